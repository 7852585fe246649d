"""A brain in another process, as a front has it in place of one of its own."""

from collections.abc import Coroutine, Iterator

from prometheus_client import CollectorRegistry, Gauge

from pdserve.config.router import RouterConfig
from pdserve.registry.base import Registry
from pdserve.request import FrontId
from pdserve.rpc.v1 import brain_pb2
from pdserve.timeline import Clock
from router.admission import AdmittedLoad
from router.brain.link import BrainLink
from router.brain.remote_placer import RemotePlacer, make_hello
from router.fleet import Fleet
from router.front_desk import FrontDesk
from router.load_book import LoadBook
from router.metrics import LABELS
from router.worker_pool import WorkerPool


class FarBrain:
    """The front's own links to workers, and the link to what chooses among them."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        clock: Clock,
        front_id: FrontId,
        metrics: CollectorRegistry,
        model_name: str,
    ) -> None:
        """Connects when `works` are run.

        Args:
            config: of the router; it names the brain's socket.
            registry: where workers are found.
            clock: of everything.
            front_id: what workers and the brain know this front by.
            metrics: takes a series.
            model_name: its label.
        """
        assert config.brain_socket is not None
        self._front_id = front_id
        self._number = config.front_number
        self._poll_s = config.registry_poll_s
        self._book = LoadBook(Fleet(config.worker_silence_s), clock)
        self.pool = WorkerPool(
            registry,
            front_id,
            self._book,
            clock,
            silence_s=config.worker_silence_s,
            max_message_bytes=4 * config.max_request_bytes,
        )
        self.others = BrainLink(
            config.brain_socket,
            self,
            silence_s=config.brain_silence_s,
            call_timeout_s=config.call_timeout_s,
        )
        self.placer = RemotePlacer(self.others, self._book)
        self._desk: FrontDesk | None = None
        up = Gauge(
            "pdserve_router_brain_up", "Whether the brain answers.", LABELS, registry=metrics
        )
        self._up = up.labels(model_name, str(config.front_number), "router")

    @property
    def is_up(self) -> bool:
        """Whether the brain answers."""
        return self.others.is_up

    def attend(self, desk: FrontDesk) -> None:
        """Names who answers other fronts; called once, before `works` are run."""
        self._desk = desk

    def works(self) -> Iterator[tuple[str, Coroutine[None, None, None]]]:
        """Yields what runs for as long as the front does, each with a name."""
        yield "pool", self.pool.run(self._poll_s)
        yield "brain", self.others.run()

    def note_figures(self) -> None:
        """Sets the gauge."""
        self._up.set(self.is_up)

    def hello(self) -> brain_pb2.FrontHello:
        """Returns who this is, and all that is in flight."""
        return make_hello(self._front_id, self._number, self._book)

    def load(self) -> AdmittedLoad:
        """Returns what this front has admitted."""
        return AdmittedLoad() if self._desk is None else self._desk.admission.load

    def on_load(self, others: AdmittedLoad) -> None:
        """Counts what other fronts have towards the limits of all."""
        if self._desk is not None:
            self._desk.admission.others = others

    def on_change(self) -> None:
        """Wakes all who wait for a worker, or for the brain."""
        self.pool.changes.note()

    async def on_question(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReply:
        """Answers another front."""
        assert self._desk is not None
        return await self._desk.answer(question)
