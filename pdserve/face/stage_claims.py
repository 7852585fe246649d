"""How a face gets its pipeline stages on other nodes: found in the registry, then claimed."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, WorkerLost
from pdserve.registry.base import Registry, RegistryUnavailable, StageRecord
from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.channel import AsyncChannel, prepare_stream
from pdserve.rpc.stage_handshake import MAX_HELLO_BYTES, Claim, check_token, knock
from pdserve.version import VERSION

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_CLAIM_TIMEOUT_S = 10.0
"""The holder may have to end the ranks of the face before."""


@dataclass(frozen=True, slots=True)
class ClaimedStage:
    """A stage whose holder waits for the order to start."""

    stage: int
    node: str
    orders: AsyncChannel
    steps: tuple[socket.socket, ...]
    """Of each rank, to become its channel to rank 0."""

    def close(self) -> None:
        """Lets go of it."""
        self.orders.close()
        for connection in self.steps:
            connection.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageClaimer:
    """Claims the stages of one incarnation of a worker."""

    config: WorkerConfig
    incarnation: Incarnation
    registry: Registry
    say: Callable[[str], None]
    """Prints a line for people."""
    patience_s: float = 5.0
    """After so long without all stages, people are told; again after twice as long, and so on."""

    async def claim_all(self) -> tuple[ClaimedStage, ...]:
        """Returns all stages but the first, in their order, once each is registered and claimed.

        Raises:
            ConfigError: there is no token, or another version runs there.
        """
        token = check_token(self.config.stage_token)
        claimed: dict[int, ClaimedStage] = {}
        wanted = range(1, self.config.engine.pipeline_parallel)
        with ExitStack() as held:
            clock = asyncio.get_running_loop().time
            patience_s = self.patience_s
            next_word_s = clock() + patience_s
            reason = "none is registered"
            while len(claimed) < len(wanted):
                for record in await self._find():
                    if record.stage in claimed or record.stage not in wanted:
                        continue
                    try:
                        async with asyncio.timeout(_CLAIM_TIMEOUT_S):
                            stage = await self._claim(record, token)
                    except (WorkerLost, OSError, TimeoutError) as error:
                        reason = f"{record.address}: {error or 'no answer'}"
                        continue
                    held.callback(stage.close)
                    claimed[record.stage] = stage
                missing = ", ".join(str(stage) for stage in wanted if stage not in claimed)
                if missing and clock() >= next_word_s:
                    self.say(f"waits for stage {missing} on another node ({reason})")
                    patience_s *= 2
                    next_word_s = clock() + patience_s
                if missing:
                    await asyncio.sleep(_LOOK_S)
            held.pop_all()
        return tuple(claimed[stage] for stage in wanted)

    async def _find(self) -> tuple[StageRecord, ...]:
        try:
            return await self.registry.list_stages(WorkerId(self.config.worker_id))
        except RegistryUnavailable as error:
            logger.warning("registry is away", extra={"reason": str(error)})
            return ()

    async def _claim(self, record: StageRecord, token: bytes) -> ClaimedStage:
        tensor = self.config.engine.tensor_parallel
        with ExitStack() as held:
            orders, node = await self._connect(record, token, None)
            held.callback(orders.close)
            steps: list[socket.socket] = []
            for rank in range(record.stage * tensor, (record.stage + 1) * tensor):
                channel, _ = await self._connect(record, token, rank)
                held.callback(channel.close)
                steps.append(channel.detach())
            held.pop_all()
        return ClaimedStage(record.stage, node, orders, tuple(steps))

    async def _connect(
        self, record: StageRecord, token: bytes, rank: int | None
    ) -> tuple[AsyncChannel, str]:
        connection = await _dial(record.address)
        channel = AsyncChannel(connection, MAX_HELLO_BYTES)
        claim = Claim(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            stage=record.stage,
            rank=rank,
        )
        try:
            prepare_stream(connection, self.config.stage_silence_s)
            accepted = await knock(channel, token, claim)
        except BaseException:
            channel.close()
            raise
        if accepted.version != VERSION:
            channel.close()
            raise ConfigError(
                f"stage {record.stage} at {record.address} runs version {accepted.version}, "
                f"this is {VERSION}"
            )
        return channel, accepted.node


async def _dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    except BaseException:
        connection.close()
        raise
    return connection
