"""A worker's face process: starts the rank, serves routers and peers, keeps the registry lease.

starting -> ready -> draining -> stopped        frozen or dead rank: stop at once, exit non-zero

SIGUSR1 drains as SIGTERM does; then the ranks go on, with their weights, behind another face.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TypeVar

from prometheus_client import CollectorRegistry

from pdserve.config.shape import ITEM_BYTES
from pdserve.config.worker import WorkerConfig
from pdserve.errors import PdserveError
from pdserve.face.cache_streams import CacheStreams
from pdserve.face.collector import WorkerCollector
from pdserve.face.membership import Membership
from pdserve.face.peers import PeerCalls
from pdserve.face.progress import ProgressMonitor
from pdserve.face.rank_group import RankGroup, start_ranks
from pdserve.face.rank_process import RankHandlers, RankProcess
from pdserve.face.service import LiveInfo, WorkerService, new_worker_info
from pdserve.face.services import FaceServices
from pdserve.face.stage_claims import ClaimedStage, StageClaimer
from pdserve.face.streams import FrontStreams, Standing
from pdserve.face.token_log import TokenLog
from pdserve.metrics import serve_metrics
from pdserve.predictor.worker_class import name_worker_class
from pdserve.registry.base import Registry, WorkerRecord
from pdserve.request import FrontId, Incarnation, WorkerId
from pdserve.rpc.server import RpcServer, join_address, make_server
from pdserve.rpc.v1 import rank_pb2, worker_pb2, worker_pb2_grpc
from pdserve.timeline import MonotonicClock

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_RANK_LOST, EXIT_FROZEN = 0, 1, 3
LAST_WORDS_S = 1.0
"""For what fronts have not been told yet."""

T = TypeVar("T")


class Face:
    """One worker's face; lives on one event loop."""

    def __init__(
        self, config: WorkerConfig, registry: Registry, on_close: Callable[[], None]
    ) -> None:
        """Starts nothing yet; `on_close` hears when the end begins."""
        self._config = config
        self._registry = registry
        self._on_close = on_close
        self._clock = MonotonicClock()
        self._incarnation = Incarnation(secrets.randbits(64))
        role = config.role.value
        self._info = new_worker_info(config.worker_id, role, self._incarnation, os.getpid())
        self._live = LiveInfo(self._info)
        self._monitor = ProgressMonitor(self._clock, config.frozen_after_s)
        self._collector = WorkerCollector(config.engine.model, config.worker_id, role)
        self._log = TokenLog(self._clock)
        self._streams = FrontStreams(self._log, self._incarnation, self._clock, self._stand)
        self._cache = CacheStreams(self._incarnation)
        self._peers = PeerCalls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()
        self._stopped_early = asyncio.Event()
        """Told to stop while it was starting: nothing is there to drain."""
        self._leaves = False
        """It was told to drain."""
        self._flips = False
        """It was told so to go on in the other pool."""
        self._exit: asyncio.Future[int | RankGroup] = asyncio.get_running_loop().create_future()
        self._rank: RankProcess | None = None
        """Rank 0."""
        self._ranks: RankGroup | None = None
        self._membership: Membership | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._started_at_s = time.monotonic()

    @property
    def was_told_to_end(self) -> bool:
        """A signal to end came when nothing was left here to drain."""
        return self._stopped_early.is_set()

    async def run(
        self, rank_module: str, services: FaceServices, ranks: RankGroup | None = None
    ) -> int | RankGroup:
        """Serves until stopped; returns the exit status, or the ranks for the other role's face.

        Args:
            rank_module: what ranks run.
            services: of this role.
            ranks: of the face before this one; None starts them.

        Raises:
            ConfigError: the rank could not start for a reason the user can mend, or a port is
                taken.
        """
        config = self._config
        handlers = RankHandlers(
            on_updates=self._on_updates,
            on_heartbeat=self._on_heartbeat,
            on_peer_call=self._on_peer_call,
            on_phase=self._on_phase,
            on_leaving=self._on_leaving,
            on_cache_changes=self._cache.publish,
        )
        server = make_server(*services.names)
        port = server.bind(config.host, config.port)
        metrics_registry = CollectorRegistry()
        metrics_registry.register(self._collector)
        metrics = serve_metrics(metrics_registry, config.host, config.metrics_port)
        try:
            self._heed_signals()
            starting = self._start_ranks(rank_module, handlers, ranks)
            started = await self._unless_stopped(starting)
            ready = None if started is None else await self._unless_stopped(started.wait_ready())
            if started is None or ready is None:
                return EXIT_OK
            rank = started.leader
            worker = WorkerService(
                rank,
                self._streams,
                self._cache,
                self._log,
                self._live,
                self._patience_s,
            )
            worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc_server)
            services.add(server, rank, config)
            address = join_address(config.host, port)
            await self._open(server, ready, address, metrics.address)
            return await self._exit
        finally:
            await self._close(server)
            metrics.close()

    def _patience_s(self) -> float:
        return max(self._config.handoff.call_timeout_s, self._monitor.limit_s)

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.can_flip:
            loop.add_signal_handler(signal.SIGUSR1, self._on_flip)

    async def _start_ranks(
        self, module: str, handlers: RankHandlers, ranks: RankGroup | None
    ) -> RankGroup:
        if ranks is not None:
            self._ranks, self._rank = ranks, ranks.leader
            self._spawn(self._run_ranks(ranks))
            await ranks.change_role(self._config.role, self._incarnation, handlers)
            return ranks
        config = self._config
        stages: tuple[ClaimedStage, ...] = ()
        if config.has_remote_stages:
            claimer = StageClaimer(
                config=config,
                incarnation=self._incarnation,
                registry=self._registry,
                say=lambda text: _say(config, text),
            )
            stages = await claimer.claim_all()
        ranks = await start_ranks(module, config, self._incarnation, handlers, stages)
        self._ranks, self._rank = ranks, ranks.leader
        self._spawn(self._run_ranks(ranks))
        return ranks

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        """Returns None when a signal came first: starting may take long."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopped_early.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _open(
        self, server: RpcServer, ready: rank_pb2.RankReady, address: str, metrics_address: str
    ) -> None:
        assert self._ranks is not None
        config = self._config
        self._info.rank_pids.extend(self._ranks.pids)
        self._info.ranks.extend(
            self._ranks.describe(config.host, config.engine.tensor_parallel)
        )  # fmt: skip
        self._info.address = address
        self._info.state = "ready"
        self._monitor.observe(1, 0.0)
        self._membership = Membership(
            self._registry,
            self._record(ready, address, metrics_address),
            config.heartbeat_s,
            config.registry_lease_s,
        )
        await server.start()
        await server.set_serving(True)
        self._renewal = self._spawn(self._membership.run())
        self._spawn(self._watch(server))
        seconds = time.monotonic() - self._started_at_s
        tokens = ready.total_blocks * ready.geometry.block_size
        _say(config, f"ready on {address} in {seconds:.1f} s, KV room for {tokens} tokens")

    def _record(
        self, ready: rank_pb2.RankReady, address: str, metrics_address: str
    ) -> WorkerRecord:
        assert self._ranks is not None
        geometry = ready.geometry
        shown = " ".join(f"{field.name}={value}" for field, value in geometry.ListFields())
        return WorkerRecord(
            worker_id=WorkerId(self._config.worker_id),
            role=self._config.role,
            incarnation=self._incarnation,
            address=address,
            metrics_address=metrics_address,
            state="ready",
            compatibility_digest=ready.compatibility_digest,
            geometry=f"{shown} model_revision={ready.model_revision}",
            model=self._config.engine.model,
            max_model_len=ready.max_model_len,
            total_blocks=ready.total_blocks,
            block_size=geometry.block_size,
            face_pid=os.getpid(),
            rank_pids=self._ranks.pids,
            worker_class=name_worker_class(
                device=ready.device,
                model=self._config.engine.model,
                dtype=geometry.dtype,
                tensor_parallel=geometry.tensor_parallel,
                pipeline_parallel=geometry.pipeline_parallel,
            ),
            max_num_seqs=self._config.engine.max_num_seqs,
            max_num_batched_tokens=self._config.engine.max_num_batched_tokens,
            kv_bytes_per_token=_kv_bytes_per_token(geometry),
        )

    async def _run_ranks(self, ranks: RankGroup) -> None:
        await ranks.wait_lost()
        self._finish(EXIT_RANK_LOST)

    async def _watch(self, server: RpcServer) -> None:
        """Looks at the rank's progress, expires what is old, frees what has no front."""
        assert self._rank is not None
        assert self._ranks is not None
        while True:
            await asyncio.sleep(self._config.heartbeat_s / 2)
            if self._monitor.look():
                fields = {"worker_id": self._info.worker_id, "silence_s": self._monitor.silence_s}
                logger.error("rank is frozen", extra=fields)
                self._info.state = "frozen"
                await server.set_serving(False)
                self._ranks.kill()
                self._finish(EXIT_FROZEN)
                return
            self._log.expire()
            for request_id, attempt in self._streams.take_orphans(self._config.orphan_grace_s):
                cancel = worker_pb2.CancelRequest(request_id=request_id, attempt=attempt)
                await self._rank.send(rank_pb2.ToRank(cancel=cancel))
                self._log.forget(request_id, attempt)

    def _on_updates(self, updates: rank_pb2.RankUpdates) -> None:
        for item in updates.updates:
            self._streams.publish(FrontId(item.front_id), item.update)

    def _on_heartbeat(self, heartbeat: rank_pb2.RankHeartbeat) -> None:
        self._monitor.observe(heartbeat.progress, heartbeat.predicted_step_s)
        self._collector.observe(heartbeat)
        self._collector.num_refused = 0 if self._ranks is None else self._ranks.num_refused
        self._streams.remember(self._live.heartbeat.load)
        self._live.heartbeat = heartbeat
        if heartbeat.is_drained:
            self._drained.set()

    def _on_peer_call(self, call_id: int, call: rank_pb2.PeerCall) -> None:
        self._spawn(self._answer_peer_call(call_id, call))

    async def _answer_peer_call(self, call_id: int, call: rank_pb2.PeerCall) -> None:
        assert self._rank is not None
        reply = await self._peers.call(call)
        await self._rank.send(rank_pb2.ToRank(call_id=call_id, peer_reply=reply))

    def _on_phase(self, phase: rank_pb2.RankPhase) -> None:
        detail = f" ({phase.detail})" if phase.detail else ""
        _say(self._config, f"{phase.name} {phase.seconds:.1f} s{detail}")

    def _stand(self) -> Standing:
        # To its last words: no front shall miss one that left by order, or give up one that flips.
        is_lost = self._exit.done() and self._exit.result() in (EXIT_RANK_LOST, EXIT_FROZEN)
        return Standing(
            load=self._live.heartbeat.load,
            is_draining=self._leaves and not is_lost,
            is_flipping=self._flips,
        )

    def _on_signal(self) -> None:
        if self._info.state == "ready":
            self._spawn(self._drain())
        elif self._flips and not self._exit.done():
            # The first signal to end: what drains goes on to do so, and then ends.
            self._flips = False
            self._info.state = "draining"
        else:
            self._stopped_early.set()
            self._finish(EXIT_OK)

    def _on_flip(self) -> None:
        if self._info.state == "ready":
            self._flips = True
            self._spawn(self._drain())

    def _on_leaving(self) -> None:
        """A stage was told to end. Unlike a second signal, a second stage cuts no drain short."""
        if not self._leaves:
            self._on_signal()

    async def _drain(self) -> None:
        assert self._rank is not None
        assert self._membership is not None
        self._leaves = True
        self._info.state = "flipping" if self._flips else "draining"
        _say(self._config, "draining")
        self._membership.record = replace(self._membership.record, state="draining")
        await self._membership.renew()
        await self._rank.send(rank_pb2.ToRank(drain=rank_pb2.Drain()))
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._drained.wait()
        except TimeoutError:
            # Nor does it flip in place: the rank still holds what nobody will ask for.
            logger.warning("drain timed out", extra={"worker_id": self._info.worker_id})
            self._finish(EXIT_OK)
        else:
            self._finish(self._ranks if self._flips and self._ranks is not None else EXIT_OK)

    def _finish(self, status: "int | RankGroup") -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if not isinstance(error, PdserveError):
            logger.error("face task failed", exc_info=error)
        self._finish(EXIT_RANK_LOST)

    async def _close(self, server: RpcServer) -> None:
        hands_over = self._exit.done() and self._exit.result() is self._ranks
        if not hands_over:
            self._on_close()
        if not self._flips:
            self._info.state = "stopped"
        await self._streams.end(LAST_WORDS_S)
        if self._renewal is not None and self._membership is not None:
            # A renewal under way could overtake the farewell and bring the record back.
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
            await self._membership.leave()
        await server.stop(0.2)
        if self._ranks is not None and not hands_over:
            await self._ranks.stop(timeout_s=3.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()


def _kv_bytes_per_token(geometry: rank_pb2.KvGeometry) -> int:
    values = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    return values * ITEM_BYTES[geometry.dtype]


def _say(config: WorkerConfig, text: str) -> None:
    """Prints a phase line for whoever started this worker by hand or through the launcher."""
    print(f"[{config.worker_id}] {text}", flush=True)  # noqa: T201 - a phase line is for people
