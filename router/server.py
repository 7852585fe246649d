"""One router front as a process: start, serve, drain, stop.

starting -> listening -> serving (health follows the pools) -> draining -> stopped
                                      first SIGTERM: refuse, finish streams; second: now
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from pdserve.chat_template import ChatTemplate
from pdserve.config.load import tell_by_flags
from pdserve.config.router import RouterConfig
from pdserve.errors import ConfigError, NoWorker
from pdserve.exposition import TextExposition
from pdserve.line_output import write_line
from pdserve.log import configure_logging
from pdserve.metrics import serve_metrics
from pdserve.models.folder import effective_max_model_len, read_model_config
from pdserve.registry.base import Registry
from pdserve.registry.redis import RedisRegistry
from pdserve.request import FrontId
from pdserve.rpc.server import RpcServer, join_address, make_server
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from pdserve.timeline import Clock, MonotonicClock
from pdserve.tokenizer import Tokenizer
from pdserve.version import VERSION
from router.admission import Admission
from router.auth import KeyGate, read_keyring
from router.brain.far import FarBrain
from router.brain.parts import Brain
from router.dispatch import Dispatcher
from router.front_desk import FrontDesk
from router.intake import Intake
from router.load_share import LoadChannel
from router.metrics import RouterMetrics
from router.openai.app import HttpFront, HttpParts
from router.openai.http_server import HttpServer
from router.prompt import RequestMaker
from router.recovery import Limits
from router.redis_loads import RedisLoadChannel
from router.run_settings import EXIT_CONFIG, GC_THRESHOLDS, front_name
from router.service import InferenceService, ServerIdentity, describe_front
from router.slo import parse_slo_classes
from router.validation import MAX_LOGPROBS, ModelLimits
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH_INTERVAL_S = 0.1
_SETTLE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What a router must know of the model: its limits, tokenizer and chat template."""

    limits: ModelLimits
    tokenizer: Tokenizer
    template: ChatTemplate | None
    info: inference_pb2.GetModelInfoResponse

    @classmethod
    def load(cls, config: RouterConfig) -> Self:
        """Reads the model folder; no weights.

        Raises:
            ConfigError: the folder or max_model_len is wrong.
        """
        folder = Path(config.model)
        model = read_model_config(folder)
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder)
        limits = ModelLimits(
            served_name=config.served_model_name or folder.name,
            vocab_size=model.vocab_size,
            max_model_len=effective_max_model_len(model, config.max_model_len),
            special_ids=tokenizer.table.special_ids,
            max_token_characters=tokenizer.max_token_characters,
        )
        info = inference_pb2.GetModelInfoResponse(
            model=limits.served_name,
            architecture=model.architecture,
            revision=model.revision,
            vocab_size=model.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=template is not None,
            block_size=config.block_size,
            max_logprobs=MAX_LOGPROBS,
        )
        return cls(limits=limits, tokenizer=tokenizer, template=template, info=info)

    def request_maker(self, pool: WorkerPool, front_id: FrontId) -> RequestMaker:
        """Returns what checks and tokenizes this model's requests, as the pool can hold them."""
        return RequestMaker(
            self.tokenizer,
            self.template,
            lambda: self.limits.within(pool.max_model_len),
            tuple(self.info.eos_token_ids),
            front_id,
        )


class RouterFront:
    """All parts of one front, and their life."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        clock: Clock,
        loads: LoadChannel | None = None,
    ) -> None:
        """Reads the model folder; listens nowhere yet.

        Args:
            config: of this front.
            registry: where workers are found.
            clock: of everything.
            loads: to other routers; None: workers' reports are all that is known of them.

        Raises:
            ConfigError: the folder or a limit is wrong.
        """
        self._config = config
        self.front_id = FrontId(f"front-{secrets.token_hex(8)}")
        series = self.metrics_registry = CollectorRegistry()
        model = ServedModel.load(config)
        engine, name = str(config.front_number), model.limits.served_name
        self._metrics = RouterMetrics(series, name, engine)
        self.brain = _make_brain(config, registry, clock, self.front_id, loads, series, name)
        self.pool = self.brain.pool
        admission = Admission(config.max_queued, config.max_in_flight)
        limits, table = _limits_of(config), model.tokenizer.table
        self.dispatcher = Dispatcher(
            self.pool, self.brain.placer, admission, clock, limits, table, self._metrics
        )
        self.intake = Intake(
            model.request_maker(self.pool, self.front_id),
            self.dispatcher,
            self._metrics,
            clock,
            config.default_timeout_s,
            parse_slo_classes(config.slo_classes),
        )
        self._keyring = read_keyring(config, secrets.token_bytes(32))
        identity = _identity_of(config, self.front_id, model, clock.now())
        self.desk = FrontDesk(
            self.dispatcher,
            lambda: describe_front(identity, self.dispatcher, self.pool, self._state, clock.now()),
            TextExposition(series),
            clock,
            self.brain.others,
        )
        self.brain.attend(self.desk)
        self.service = InferenceService(self.intake, self.pool, identity, self._keyring, self.desk)
        self._server: RpcServer | None = None
        self._http: HttpServer | None = None
        self.http_port: int | None = None
        """Where HTTP listens, once started; None when it is off."""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_serving = False

    async def start(self) -> int:
        """Listens and begins to find workers; returns the gRPC port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        gates = () if self._keyring.is_open else (KeyGate(self._keyring),)
        server = make_server(
            SERVICE_NAME,
            max_message_bytes=self._config.max_request_bytes,
            interceptors=gates,
            shares_port=self._shares_ports,
        )
        port = server.bind(self._config.host, self._config.port)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, server.grpc_server)
        self._server = server
        if not self._config.no_http:
            self._http = HttpServer(self._make_http_app())
            self.http_port = await self._http.start(
                self._config.host, self._config.http_port, shares_port=self._shares_ports
            )
        await server.start()
        works = [*self.brain.works(), ("health", self._watch())]
        self._tasks = [asyncio.create_task(work, name=name) for name, work in works]
        return port

    @property
    def _state(self) -> str:
        if self.intake.is_draining:
            return "draining"
        return "serving" if self._is_serving else "waiting"

    @property
    def _shares_ports(self) -> bool:
        return self._config.brain_socket is not None

    def _make_http_app(self) -> ASGIApp:
        parts = HttpParts(
            intake=self.intake,
            keyring=self._keyring,
            desk=self.desk,
            registry=self.metrics_registry,
            engine=str(self._config.front_number),
            can_serve=lambda: self._is_serving,
            max_body_bytes=self._config.max_request_bytes,
            is_strict=self._config.strict_fields,
        )
        return HttpFront(parts).make_app()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work at once and waits for the streams that run."""
        assert self._server is not None
        self.intake.is_draining = True
        self._is_serving = False
        await self._server.set_serving(False)
        logger.info("draining", extra={"num_in_flight": self.dispatcher.num_in_flight})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.dispatcher.wait_idle()

    async def stop(self) -> None:
        """Ends what is left, with a status, and closes everything."""
        self.intake.is_draining = True
        self.dispatcher.end_all(NoWorker("this router stopped"))
        await self.dispatcher.settle(_SETTLE_S)
        stops = [] if self._server is None else [self._server.stop(_SETTLE_S)]
        if self._http is not None:
            stops.append(self._http.stop(_SETTLE_S))
        await asyncio.gather(*stops)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.pool.close()

    async def _watch(self) -> None:
        """Keeps health and gauges true: SERVING means that a request could be placed now."""
        assert self._server is not None
        while True:
            has_workers = self.pool.can_serve or self._config.pools_may_be_empty
            can_serve = has_workers and self.brain.is_up and not self.intake.is_draining
            if can_serve != self._is_serving:
                self._is_serving = can_serve
                await self._server.set_serving(can_serve)
                logger.info("health changed", extra={"is_serving": can_serve})
            num_waiting = self.dispatcher.admission.num_waiting
            self.brain.note_figures()
            self._metrics.note_load(
                num_running=self.dispatcher.num_in_flight - num_waiting, num_waiting=num_waiting
            )
            await asyncio.sleep(_HEALTH_INTERVAL_S)


def _make_brain(
    config: RouterConfig,
    registry: Registry,
    clock: Clock,
    front_id: FrontId,
    loads: LoadChannel | None,
    series: CollectorRegistry,
    model_name: str,
) -> Brain | FarBrain:
    """Returns one of this front's own, or the way to that of several fronts."""
    if config.brain_socket is None:
        return Brain(config, registry, clock, front_id, loads, series, model_name)
    return FarBrain(config, registry, clock, front_id, series, model_name)


def _identity_of(
    config: RouterConfig, front_id: FrontId, model: ServedModel, started_at_s: float
) -> ServerIdentity:
    return ServerIdentity(
        front_id=front_id,
        version=VERSION,
        process_name=_process_name(config),
        started_at_s=started_at_s,
        model_info=model.info,
    )


def _limits_of(config: RouterConfig) -> Limits:
    return Limits(
        max_attempts=config.max_attempts,
        max_client_buffer_bytes=config.max_client_buffer_bytes,
        call_timeout_s=config.call_timeout_s,
        submit_timeout_s=config.submit_timeout_s,
        no_worker_wait_s=config.no_worker_wait_s,
        max_local_tokens=config.local_prefill_tokens,
    )


async def serve(config: RouterConfig) -> None:
    """Runs a front until SIGTERM or SIGINT.

    Raises:
        ConfigError: something the user can mend.
    """
    stop_signal, stop_now = asyncio.Event(), asyncio.Event()

    def take_signal() -> None:
        (stop_now if stop_signal.is_set() else stop_signal).set()

    gc.set_threshold(*GC_THRESHOLDS)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, take_signal)
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(RedisRegistry(config.redis_url, config.cluster))
        loads = await stack.enter_async_context(RedisLoadChannel(config.redis_url, config.cluster))
        front = RouterFront(config, registry, MonotonicClock(), loads)
        where: list[str] = []
        if config.brain_socket is None:
            metrics = serve_metrics(front.metrics_registry, config.host, config.metrics_port)
            stack.callback(metrics.close)
            where.append(f"metrics http://{metrics.address}/metrics")
        port = await front.start()
        stack.push_async_callback(front.stop)
        # What was loaded stays: a full collection that walks over it takes 30 to 80 ms.
        gc.collect()
        gc.freeze()
        if front.http_port is not None:
            where.insert(0, f"http http://{join_address(config.host, front.http_port)}")
        where.insert(0, f"grpc {join_address(config.host, port)}")
        write_line(sys.stdout, f"router ready: {', '.join(where)}")
        await stop_signal.wait()
        drained = asyncio.create_task(front.drain(config.drain_timeout_s))
        forced = asyncio.create_task(stop_now.wait())
        await asyncio.wait((drained, forced), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, forced):
            task.cancel()
        await asyncio.wait((drained, forced))


def _process_name(config: RouterConfig) -> str:
    return "router" if config.brain_socket is None else front_name(config.front_number)


def run(config: RouterConfig) -> int:
    """Runs one front in this process; returns the exit status (0 drained, 2 bad settings)."""
    configure_logging(config.log_level, fields={"process": _process_name(config)})
    try:
        uvloop.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"error: {tell_by_flags(error, RouterConfig)}\n")
        return EXIT_CONFIG
    return 0
