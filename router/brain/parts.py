"""The brain: all that a choice is made from. The same parts in a front's process or in their own.

registry, worker streams -> fleet <- load book <- placer <- fronts
workers' cache events -> prefix index     workers' steps -> predictor -> laws
"""

import secrets
from collections.abc import Coroutine, Iterator

from prometheus_client import CollectorRegistry

from pdserve.config.router import RouterConfig
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile_files import read_profiles
from pdserve.registry.base import Registry
from pdserve.request import FrontId
from pdserve.timeline import Clock
from router.cache_watch import CacheWatch
from router.cost import LawTable
from router.fleet import Fleet
from router.front_desk import FrontDesk
from router.index_metrics import IndexCollector
from router.load_book import LoadBook
from router.load_share import LoadChannel, LoadShare
from router.placer import InProcessPlacer
from router.policy import JointPolicy
from router.predictor_metrics import PredictorMetrics
from router.prefix_index import PrefixIndex
from router.waiting_room import WaitingRoom
from router.worker_pool import WorkerPool


class Brain:
    """Index, fleet, book, predictor, policy and the room where turns are waited for."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        clock: Clock,
        front_id: FrontId,
        loads: LoadChannel | None,
        metrics: CollectorRegistry,
        model_name: str,
    ) -> None:
        """Knows no worker before `works` are run.

        Args:
            config: of the router.
            registry: where workers are found.
            clock: of everything.
            front_id: what workers and other routers know this process by.
            loads: to other routers; None: workers' reports are all that is known of them.
            metrics: takes the series of index and predictor.
            model_name: their label.

        Raises:
            ConfigError: a profile cannot be read.
        """
        engine = "0" if config.brain_socket is None else "brain"
        fleet = Fleet(config.worker_silence_s)
        self.clock = clock
        self.book = LoadBook(fleet, clock)
        self._share = None if loads is None else LoadShare(front_id, fleet, loads, clock)
        self._predictor = Predictor(read_profiles(config.profiles))
        table = LawTable(fleet, self._predictor)
        self.pool = WorkerPool(
            registry,
            front_id,
            self.book,
            clock,
            silence_s=config.worker_silence_s,
            max_message_bytes=4 * config.max_request_bytes,
            predictor=self._predictor,
        )
        self.index = PrefixIndex(clock=clock, seed=secrets.randbits(63))
        self._watch = CacheWatch(self.pool, self.index, front_id)
        metrics.register(IndexCollector(model_name, self.index, self._watch, engine))
        self._metrics = PredictorMetrics(metrics, model_name, engine)
        self._poll_s = config.registry_poll_s
        self.room = WaitingRoom(self.book, clock)
        self.placer = InProcessPlacer(
            JointPolicy(fleet, table),
            self.book,
            self.index,
            clock,
            config.local_prefill_tokens,
            table,
            self.room,
        )

    @property
    def is_up(self) -> bool:
        """Whether it answers: it is here."""
        return True

    @property
    def others(self) -> None:
        """The way to other fronts: of those that share this brain, the brain itself has it."""
        return None

    def attend(self, desk: FrontDesk) -> None:
        """Takes note of who answers other fronts: nobody asks."""

    def works(self) -> Iterator[tuple[str, Coroutine[None, None, None]]]:
        """Yields what runs for as long as the process does, each with a name."""
        yield "pool", self.pool.run(self._poll_s)
        yield "caches", self._watch.run()
        if self._share is not None:
            yield "load share", self._share.run()

    def note_figures(self) -> None:
        """Sets the predictor's gauges."""
        self._metrics.note(self._predictor.qualities())
