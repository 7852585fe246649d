"""A pipeline stage on another node, as its face sees it: its ranks' messages, life and death."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from pdserve.errors import ConfigError, WorkerLost
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.stage_handshake import receive_from_stage
from pdserve.rpc.v1 import rank_pb2, stage_pb2

logger = logging.getLogger(__name__)

BEATS_PER_SILENCE = 5
"""Beats in the time after which a missing one means the end."""


@dataclass(slots=True)
class RemoteStage:
    """One stage that was claimed; `run` must be awaited as a task for anything to arrive."""

    stage: int
    ranks: range
    node: str
    channel: AsyncChannel
    silence_s: float
    on_key: Callable[[int, rank_pb2.StoreKey], None]
    on_leaving: Callable[[], None]
    """Called when the stage's holder was told to end."""
    compatibility_digest: bytes
    """Of the face's model: the stage must have the same."""
    pids: tuple[int, ...] = ()
    """On that node; known once started."""
    num_refused: int = 0
    """Connections that the stage's holder has refused."""
    _ready: dict[int, asyncio.Future[rank_pb2.RankReady]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nobody is ready yet."""
        loop = asyncio.get_running_loop()
        self._ready = {rank: loop.create_future() for rank in self.ranks}

    @property
    def ready(self) -> tuple[asyncio.Future[rank_pb2.RankReady], ...]:
        """Of each rank."""
        return tuple(self._ready.values())

    async def start(self, config: str) -> None:
        """Orders the stage's ranks to be started with a `WorkerConfig` as JSON.

        Raises:
            WorkerLost: the connection broke.
        """
        start = stage_pb2.StartStage(config=config, silence_s=self.silence_s)
        await self._send(stage_pb2.ToStage(start=start))

    async def run(self) -> None:
        """Receives until a rank or the connection is gone."""
        beating = asyncio.create_task(self._beat())
        reason = "its face ended"
        try:
            while True:
                async with asyncio.timeout(self.silence_s):
                    message = await receive_from_stage(self.channel)
                self._dispatch(message)
        except TimeoutError:
            reason = f"nothing came from it for {self.silence_s:g} s"
        except ChannelClosed as error:
            reason = str(error)
        except WorkerLost as error:
            reason = str(error)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            fields = {"stage": self.stage, "node": self.node, "reason": reason}
            logger.warning("stage lost", extra=fields)
            self._fail(WorkerLost(f"stage {self.stage} on {self.node} is lost: {reason}"))
            # Its holder kills the ranks when this connection ends.
            self.channel.close()

    def kill(self) -> None:
        """Lets go of the stage: its holder kills the ranks."""
        self.channel.shut()

    async def tell(self, rank: int, message: rank_pb2.ToRank) -> None:
        """Sends a message to a rank of this stage.

        Raises:
            WorkerLost: the connection broke.
        """
        payload = stage_pb2.RankPayload(rank=rank, payload=message.SerializeToString())
        await self._send(stage_pb2.ToStage(to_rank=payload))

    def _dispatch(self, message: stage_pb2.FromStage) -> None:
        match message.WhichOneof("message"):
            case "started":
                self._note_start(message.started)
            case "leaving":
                self.on_leaving()
            case "beat":
                self.num_refused = message.beat.num_refused
            case "from_rank":
                rank = message.from_rank.rank
                if rank in self._ready:
                    self._hear(rank, _decode(message.from_rank.payload))
            case "ended":
                ended = message.ended
                raise WorkerLost(f"rank {ended.rank} ended with status {ended.status}")
            case other:
                raise WorkerLost(f"its holder spoke out of turn: {other}")

    def _note_start(self, started: stage_pb2.StageStarted) -> None:
        self.pids = tuple(started.pids)
        if started.compatibility_digest != self.compatibility_digest:
            self._fail(
                ConfigError(
                    f"stage {self.stage} on {self.node} has another model than its face: "
                    f"revision {started.model_revision}"
                )
            )

    def _fail(self, error: ConfigError | WorkerLost) -> None:
        for future in self._ready.values():
            if not future.done():
                future.set_exception(error)
                # Whoever waits for all ranks hears of the first alone.
                future.exception()

    def _hear(self, rank: int, message: rank_pb2.FromRank) -> None:
        future = self._ready[rank]
        match message.WhichOneof("message"):
            case "key":
                self.on_key(rank, message.key)
            case "ready" if not future.done():
                future.set_result(message.ready)
            case "failed" if not future.done():
                where = f"stage {self.stage} on {self.node}: {message.failed.message}"
                error = ConfigError if message.failed.is_user_error else WorkerLost
                future.set_exception(error(where))
            case other:
                logger.debug("dropped", extra={"rank": rank, "kind": other})

    async def _beat(self) -> None:
        try:
            while True:
                await self._send(stage_pb2.ToStage(beat=stage_pb2.StageBeat()))
                await asyncio.sleep(self.silence_s / BEATS_PER_SILENCE)
        except WorkerLost:
            return  # whoever receives finds out, too

    async def _send(self, message: stage_pb2.ToStage) -> None:
        try:
            await self.channel.send(message.SerializeToString())
        except ChannelClosed as error:
            raise WorkerLost(f"stage {self.stage} on {self.node} is lost: {error}") from error


def _decode(payload: bytes) -> rank_pb2.FromRank:
    try:
        return rank_pb2.FromRank.FromString(payload)
    except DecodeError as error:
        raise WorkerLost("a rank's bytes are no message") from error
