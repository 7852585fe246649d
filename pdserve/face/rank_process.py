"""The rank process behind a face: started by exec, spoken to in protobuf, killed if it freezes."""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdserve.config.load import names_nccl_interface
from pdserve.config.wire import worker_config_to_json
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, DeadlineExceeded, PdserveError, WorkerLost
from pdserve.face.nccl_interface import list_interfaces, nccl_environment
from pdserve.face.rank_gpus import VISIBLE_GPUS
from pdserve.process import ChildProcess, spawn
from pdserve.request import Incarnation, Role
from pdserve.rpc.channel import AsyncChannel, ChannelClosed, make_pair
from pdserve.rpc.error_parts import error_from_parts
from pdserve.rpc.server import resolve_host
from pdserve.rpc.v1 import rank_pb2

logger = logging.getLogger(__name__)


def _ignore_key(rank: int, key: rank_pb2.StoreKey) -> None:
    """Ranks of one machine meet in a folder."""


def _ignore_cache(changes: rank_pb2.CacheChanges) -> None:
    """Nobody asks what is cached."""


@dataclass(kw_only=True, slots=True)
class RankHandlers:
    """What the face does with messages that are no replies. Called on the event loop."""

    on_updates: Callable[[rank_pb2.RankUpdates], None]
    on_heartbeat: Callable[[rank_pb2.RankHeartbeat], None]
    on_peer_call: Callable[[int, rank_pb2.PeerCall], None]
    on_phase: Callable[[rank_pb2.RankPhase], None]
    on_leaving: Callable[[], None]
    """A stage on another node has been told to end."""
    on_key: Callable[[int, rank_pb2.StoreKey], None] = _ignore_key
    """Takes the rank, too."""
    on_cache_changes: Callable[[rank_pb2.CacheChanges], None] = _ignore_cache


@dataclass(slots=True)
class RankProcess:
    """One rank; `run` must be awaited as a task for anything to arrive."""

    rank: int
    child: ChildProcess
    channel: AsyncChannel
    handlers: RankHandlers
    ready: asyncio.Future[rank_pb2.RankReady]
    _calls: dict[int, asyncio.Future[rank_pb2.RankReply]] = field(default_factory=dict)
    _next_call_id: int = 1

    async def run(self) -> None:
        """Receives until the rank is gone; then fails every call that still waits."""
        try:
            while True:
                self._dispatch(rank_pb2.FromRank.FromString(await self.channel.receive()))
        except ChannelClosed:
            logger.info("rank closed its channel", extra={"pid": self.child.pid})
        finally:
            lost = WorkerLost("the rank process ended")
            if not self.ready.done():
                self.ready.set_exception(lost)
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(lost)
            self._calls.clear()

    def _dispatch(self, message: rank_pb2.FromRank) -> None:
        match message.WhichOneof("message"):
            case "reply":
                future = self._calls.pop(message.call_id, None)
                if future is not None and not future.done():
                    future.set_result(message.reply)
            case "updates":
                self.handlers.on_updates(message.updates)
            case "heartbeat":
                self.handlers.on_heartbeat(message.heartbeat)
            case "cache_changes":
                self.handlers.on_cache_changes(message.cache_changes)
            case "peer_call":
                self.handlers.on_peer_call(message.call_id, message.peer_call)
            case _:
                self._dispatch_start(message)

    def _dispatch_start(self, message: rank_pb2.FromRank) -> None:
        """Takes what a rank says while it starts."""
        match message.WhichOneof("message"):
            case "phase":
                self.handlers.on_phase(message.phase)
            case "key":
                self.handlers.on_key(self.rank, message.key)
            case "ready":
                self.ready.set_result(message.ready)
            case "failed":
                self._fail_start(message.failed)
            case other:
                raise AssertionError(f"unknown message from rank: {other}")

    def _fail_start(self, failed: rank_pb2.RankFailed) -> None:
        error = ConfigError if failed.is_user_error else WorkerLost
        if not self.ready.done():
            self.ready.set_exception(error(failed.message))

    async def change_role(self, role: Role, incarnation: Incarnation) -> None:
        """Tells a drained rank 0 to go on as another role; `ready` is then that role's.

        Raises:
            WorkerLost: the rank died.
        """
        self.ready = asyncio.get_running_loop().create_future()
        change = rank_pb2.ChangeRole(role=role, incarnation=incarnation)
        await self.send(rank_pb2.ToRank(change_role=change))

    async def call(self, message: rank_pb2.ToRank, timeout_s: float) -> rank_pb2.RankReply:
        """Sends a call and waits for its reply.

        Raises:
            PdserveError: the rank refused; the same type that it raised.
            DeadlineExceeded: no reply in time.
            WorkerLost: the rank died.
        """
        message.call_id = self._next_call_id
        self._next_call_id += 1
        future: asyncio.Future[rank_pb2.RankReply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(message)
                reply = await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"the rank did not answer within {timeout_s:g} s") from error
        finally:
            self._calls.pop(message.call_id, None)
        if reply.WhichOneof("reply") == "error":
            wire = reply.error
            raise error_from_parts(
                code=wire.code, reason=wire.reason, message=wire.message, field=wire.field
            )
        return reply

    async def send(self, message: rank_pb2.ToRank) -> None:
        """Sends a message that has no reply.

        Raises:
            WorkerLost: the rank died.
        """
        try:
            await self.channel.send(message.SerializeToString())
        except ChannelClosed as error:
            raise WorkerLost("the rank process ended") from error

    async def stop(self, timeout_s: float) -> None:
        """Asks the rank to end, and kills it when it does not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(rank_pb2.ToRank(shutdown=rank_pb2.Shutdown()))
        except (TimeoutError, PdserveError):
            self.child.kill()
        waited_s = 0.0
        while self.child.poll() is None and waited_s < timeout_s:
            await asyncio.sleep(0.02)
            waited_s += 0.02
        self.child.kill()
        self.child.wait(timeout_s)
        self.channel.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """A rank among those of its replica."""

    rank: int = 0
    rank_fds: tuple[int, ...] = ()
    """On rank 0 the channels to all others, on these the one to rank 0."""
    group_folder: Path | None = None
    """Where the ranks meet; None where their face relays their keys, or there is only one."""
    gpu: str | None = None
    """The one that it sees; None leaves it what its face sees."""


def spawn_rank(
    module: str, config: WorkerConfig, incarnation: Incarnation, place: RankPlace
) -> tuple[ChildProcess, AsyncChannel]:
    """Execs `python -m module` with one end of a channel, and returns the other.

    Call from the loop's (main) thread.
    """
    ours, theirs = make_pair()
    # What ps shows to everybody holds no secret; a rank needs neither.
    told = replace(config, redis_url="", stage_token=None)
    argv = [sys.executable, "-m", module]
    argv += ["--channel-fd", str(theirs.fileno()), "--incarnation", str(incarnation)]
    argv += ["--config", worker_config_to_json(told)]
    if place.rank_fds:
        argv += ["--rank", str(place.rank), "--rank-fds", *map(str, place.rank_fds)]
    if place.group_folder is not None:
        argv += ["--group-folder", str(place.group_folder)]
    # One thread a rank: OpenMP barriers between busy processes cost 50x (two cores, torch 2.13).
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if place.gpu is not None:
        environment[VISIBLE_GPUS] = place.gpu
    if config.engine.device == "cuda" and not names_nccl_interface():
        environment |= nccl_environment(resolve_host(config.host), list_interfaces())
    child = spawn(
        argv,
        pass_fds=(theirs.fileno(), *place.rank_fds),
        env=environment,
        name=f"{config.worker_id}-rank{place.rank}",
    )
    theirs.close()
    return child, AsyncChannel(ours)


def start_rank(
    module: str,
    config: WorkerConfig,
    incarnation: Incarnation,
    handlers: RankHandlers,
    place: RankPlace = RankPlace(),
) -> RankProcess:
    """Starts a rank on this machine; see `spawn_rank`."""
    child, channel = spawn_rank(module, config, incarnation, place)
    ready: asyncio.Future[rank_pb2.RankReady] = asyncio.get_running_loop().create_future()
    return RankProcess(place.rank, child, channel, handlers, ready)
