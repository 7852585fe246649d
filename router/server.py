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
from pdserve.config.load import name_flag
from pdserve.config.router import RouterConfig
from pdserve.errors import ConfigError, NoWorker
from pdserve.line_output import write_line
from pdserve.log import configure_logging
from pdserve.metrics import serve_metrics
from pdserve.models.folder import effective_max_model_len, read_model_config
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile_files import read_profiles
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
from router.cache_watch import CacheWatch
from router.cost import LawTable
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.index_metrics import IndexCollector
from router.intake import Intake
from router.load_book import LoadBook
from router.load_share import LoadChannel, LoadShare
from router.metrics import RouterMetrics
from router.openai.app import HttpFront, HttpParts
from router.openai.http_server import HttpServer
from router.placer import InProcessPlacer
from router.policy import JointPolicy
from router.prefix_index import PrefixIndex
from router.prompt import RequestMaker
from router.recovery import Limits
from router.redis_loads import RedisLoadChannel
from router.service import InferenceService, ServerIdentity
from router.slo import parse_slo_classes
from router.validation import MAX_LOGPROBS, ModelLimits
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
EXIT_CONFIG = 2

GC_THRESHOLDS = (20_000, 20, 100)

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
            loads: to other fronts; None: workers' reports are all that is known of them.

        Raises:
            ConfigError: the folder or a limit is wrong.
        """
        self._config = config
        self.front_id = FrontId(f"front-{secrets.token_hex(8)}")
        self.metrics_registry = CollectorRegistry()
        model = ServedModel.load(config)
        self._metrics = RouterMetrics(self.metrics_registry, model.limits.served_name)
        fleet = Fleet(config.worker_silence_s)
        book = LoadBook(fleet, clock)
        self._share = None if loads is None else LoadShare(self.front_id, fleet, loads, clock)
        self.predictor = Predictor(read_profiles(config.profiles))
        table = LawTable(fleet, self.predictor)
        self.pool = WorkerPool(
            registry,
            self.front_id,
            book,
            clock,
            silence_s=config.worker_silence_s,
            max_message_bytes=4 * config.max_request_bytes,
            predictor=self.predictor,
        )
        self.index = PrefixIndex(clock=clock, seed=secrets.randbits(63))
        self._cache_watch = CacheWatch(self.pool, self.index, self.front_id)
        self.metrics_registry.register(
            IndexCollector(model.limits.served_name, self.index, self._cache_watch)
        )
        self.dispatcher = Dispatcher(
            self.pool,
            InProcessPlacer(
                JointPolicy(fleet, table),
                book,
                self.index,
                clock,
                config.local_prefill_tokens,
                table,
            ),
            Admission(config.max_queued, config.max_in_flight),
            clock,
            Limits(
                max_attempts=config.max_attempts,
                max_client_buffer_bytes=config.max_client_buffer_bytes,
                call_timeout_s=config.call_timeout_s,
                submit_timeout_s=config.submit_timeout_s,
                no_worker_wait_s=config.no_worker_wait_s,
                max_local_tokens=config.local_prefill_tokens,
            ),
            model.tokenizer.table,
            self._metrics,
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
        self.service = InferenceService(
            self.intake,
            self.pool,
            ServerIdentity(
                front_id=self.front_id,
                version=VERSION,
                started_at_s=clock.now(),
                model_info=model.info,
            ),
            self._keyring,
            clock,
        )
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
            SERVICE_NAME, max_message_bytes=self._config.max_request_bytes, interceptors=gates
        )
        port = server.bind(self._config.host, self._config.port)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, server.grpc_server)
        self._server = server
        if not self._config.no_http:
            self._http = HttpServer(self._make_http_app())
            self.http_port = await self._http.start(self._config.host, self._config.http_port)
        await server.start()
        self._tasks = [
            asyncio.create_task(self.pool.run(self._config.registry_poll_s), name="pool"),
            asyncio.create_task(self._cache_watch.run(), name="caches"),
            asyncio.create_task(self._watch(), name="health"),
        ]
        if self._share is not None:
            self._tasks.append(asyncio.create_task(self._share.run(), name="load share"))
        return port

    def _make_http_app(self) -> ASGIApp:
        parts = HttpParts(
            intake=self.intake,
            keyring=self._keyring,
            registry=self.metrics_registry,
            can_serve=lambda: self._is_serving,
            max_body_bytes=self._config.max_request_bytes,
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
            can_serve = has_workers and not self.intake.is_draining
            if can_serve != self._is_serving:
                self._is_serving = can_serve
                await self._server.set_serving(can_serve)
                logger.info("health changed", extra={"is_serving": can_serve})
            num_waiting = self.dispatcher.admission.num_waiting
            self._metrics.note_predictor(self.predictor.qualities())
            self._metrics.note_load(
                num_running=self.dispatcher.num_in_flight - num_waiting, num_waiting=num_waiting
            )
            await asyncio.sleep(_HEALTH_INTERVAL_S)


async def serve(config: RouterConfig) -> None:
    """Runs a front until SIGTERM or SIGINT.

    Raises:
        ConfigError: something the user can mend.
    """
    stop_signal, stop_now = asyncio.Event(), asyncio.Event()

    def take_signal() -> None:
        (stop_now if stop_signal.is_set() else stop_signal).set()

    # Little of what is made per token lives long, and nothing of it is in cycles: at the usual 700
    # objects a collection took 10 % of the time of a token.
    gc.set_threshold(*GC_THRESHOLDS)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, take_signal)
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(RedisRegistry(config.redis_url, config.cluster))
        loads = await stack.enter_async_context(RedisLoadChannel(config.redis_url, config.cluster))
        front = RouterFront(config, registry, MonotonicClock(), loads)
        metrics = serve_metrics(front.metrics_registry, config.host, config.metrics_port)
        stack.callback(metrics.close)
        port = await front.start()
        stack.push_async_callback(front.stop)
        # What was loaded stays: a full collection that walks over it takes 30 to 80 ms.
        gc.collect()
        gc.freeze()
        address = join_address(config.host, port)
        where = [f"grpc {address}"]
        if front.http_port is not None:
            where.append(f"http http://{join_address(config.host, front.http_port)}")
        where.append(f"metrics http://{metrics.address}/metrics")
        write_line(sys.stdout, f"router ready: {', '.join(where)}")
        await stop_signal.wait()
        drained = asyncio.create_task(front.drain(config.drain_timeout_s))
        forced = asyncio.create_task(stop_now.wait())
        await asyncio.wait((drained, forced), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, forced):
            task.cancel()
        await asyncio.wait((drained, forced))


def run(config: RouterConfig) -> int:
    """Runs one front in this process; returns the exit status (0 drained, 2 bad settings)."""
    configure_logging(config.log_level, fields={"process": "router"})
    try:
        uvloop.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"error: {name_flag(str(error), RouterConfig)}\n")
        return EXIT_CONFIG
    return 0
