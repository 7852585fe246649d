"""One incarnation of a stage: its ranks as children of this process, as their face orders.

claimed -> starting -> running -> ended      whatever ends first, a rank or the face, ends them all
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path

from pdserve.config.load import read_visible_gpus, tell_by_flags
from pdserve.config.stage import StageConfig
from pdserve.config.wire import worker_config_from_json
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.face.rank_gpus import deal_gpus
from pdserve.face.rank_process import RankPlace, spawn_rank
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.process import ChildProcess
from pdserve.request import Incarnation, Role
from pdserve.rpc.channel import AsyncChannel, ChannelClosed, prepare_stream
from pdserve.rpc.stage_handshake import receive_to_stage
from pdserve.rpc.v1 import rank_pb2, stage_pb2

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 10.0
_LAST_WORDS_S = 1.0
_POLL_S = 0.02
BEATS_PER_SILENCE = 5
"""Beats in the time after which a missing one means the end."""


class StageEnded(Exception):
    """The life is over; the text says why."""


class StageLife:
    """Lives on the loop of the process's main thread, whose end ends the ranks."""

    def __init__(
        self,
        channel: AsyncChannel,
        incarnation: Incarnation,
        config: StageConfig,
        modules: Mapping[Role, str],
        count_refused: Callable[[], int],
    ) -> None:
        """Owns the channel, which carries the orders of a face of this incarnation.

        Args:
            channel: as above.
            incarnation: as above.
            config: of this stage.
            modules: what a rank of each role runs, as `python -m MODULE`.
            count_refused: connections that the door has refused.
        """
        self.incarnation = incarnation
        self._channel = channel
        self._config = config
        self._modules = modules
        self._count_refused = count_refused
        self._steps: dict[int, AsyncChannel] = {}
        self._ranks: dict[int, tuple[ChildProcess, AsyncChannel]] = {}

    def add_steps(self, rank: int, channel: AsyncChannel) -> None:
        """Takes over the channel between rank 0 and a rank of this stage."""
        if rank in self._steps:
            self._steps[rank].close()
        self._steps[rank] = channel

    async def leave(self) -> None:
        """Asks the face to drain and to let go of this stage.

        Raises:
            ChannelClosed: it has let go already.
        """
        await self._tell(stage_pb2.FromStage(leaving=stage_pb2.StageLeaving()))

    async def run(self) -> None:
        """Lives; returns when no process is left."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                order = await receive_to_stage(self._channel)
            if not order.HasField("start"):
                raise StageEnded("the face spoke out of turn")
            await self._start(order.start)
            await self._live(order.start.silence_s)
        except (StageEnded, ChannelClosed, TimeoutError) as error:
            fields = {"worker_id": self._config.worker_id, "reason": str(error) or "no order came"}
            logger.info("stage ended", extra={"stage": self._config.stage, **fields})
        finally:
            await self._end()

    async def _start(self, start: stage_pb2.StartStage) -> None:
        try:
            worker = self._adopt(worker_config_from_json(start.config))
            tensor = worker.engine.tensor_parallel
            ranks = range(self._config.stage * tensor, (self._config.stage + 1) * tensor)
            missing = [rank for rank in ranks if rank not in self._steps]
            if missing or len(self._steps) > tensor:
                raise StageEnded("the face opened other connections than it has ranks here")
            model = read_model_config(Path(worker.engine.model))
            geometry = geometry_of(model, worker.engine)
            gpus: tuple[str | None, ...] = (None,) * tensor
            if worker.engine.device == "cuda":
                gpus = deal_gpus(read_visible_gpus(), tensor)
        except ConfigError as error:
            text = tell_by_flags(error, WorkerConfig)
            await self._refuse(text)
            raise StageEnded(text) from error
        for rank, gpu in zip(ranks, gpus, strict=True):
            connection = self._steps[rank].detach()
            prepare_stream(connection, start.silence_s)
            place = RankPlace(rank=rank, rank_fds=(connection.fileno(),), gpu=gpu)
            module = self._modules[worker.role]
            self._ranks[rank] = spawn_rank(module, worker, self.incarnation, place)
            connection.close()
        self._steps.clear()
        pids = [child.pid for child, _ in self._ranks.values()]
        started = stage_pb2.StageStarted(
            pids=pids,
            compatibility_digest=geometry.digest(),
            model_revision=geometry.model_revision,
        )
        await self._tell(stage_pb2.FromStage(started=started))
        fields = {"worker_id": worker.worker_id, "stage": self._config.stage, "pids": pids}
        logger.info("stage started", extra={"incarnation": f"{self.incarnation:016x}", **fields})

    def _adopt(self, worker: WorkerConfig) -> WorkerConfig:
        """Returns a worker's settings as they hold on this node."""
        model = self._config.model or worker.engine.model
        return replace(
            worker, host=self._config.host, engine=replace(worker.engine, model=model)
        )  # fmt: skip

    async def _refuse(self, text: str) -> None:
        """Fails the start in the words of a rank that could not."""
        failed = rank_pb2.RankFailed(message=text, is_user_error=True)
        rank = min(self._steps, default=0)
        await self._pass_on(rank, rank_pb2.FromRank(failed=failed).SerializeToString())

    async def _live(self, silence_s: float) -> None:
        jobs: list[Coroutine[None, None, None]] = [self._beat(silence_s), self._obey(silence_s)]
        jobs += [self._speak_for(rank, *ends) for rank, ends in self._ranks.items()]
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self, silence_s: float) -> None:
        while True:
            beat = stage_pb2.StageBeat(num_refused=self._count_refused())
            await self._tell(stage_pb2.FromStage(beat=beat))
            await asyncio.sleep(silence_s / BEATS_PER_SILENCE)

    async def _obey(self, silence_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    order = await receive_to_stage(self._channel)
            except TimeoutError:
                raise StageEnded(f"the face was silent for {silence_s:g} s") from None
            if order.HasField("to_rank") and order.to_rank.rank in self._ranks:
                await self._ranks[order.to_rank.rank][1].send(order.to_rank.payload)

    async def _speak_for(self, rank: int, child: ChildProcess, channel: AsyncChannel) -> None:
        try:
            while True:
                await self._pass_on(rank, await channel.receive())
        except ChannelClosed:
            status = await _wait(child, _LAST_WORDS_S)
        ended = stage_pb2.RankEnded(rank=rank, status=status or 0)
        await self._tell(stage_pb2.FromStage(ended=ended))
        raise StageEnded(f"rank {rank} ended with status {status}")

    async def _pass_on(self, rank: int, payload: bytes) -> None:
        message = stage_pb2.RankPayload(rank=rank, payload=payload)
        await self._tell(stage_pb2.FromStage(from_rank=message))

    async def _tell(self, message: stage_pb2.FromStage) -> None:
        await self._channel.send(message.SerializeToString())

    async def _end(self) -> None:
        for child, _ in self._ranks.values():
            child.kill()
        self._channel.close()
        for steps in self._steps.values():
            steps.close()
        for child, channel in self._ranks.values():
            await _wait(child, None)
            channel.close()


async def _wait(child: ChildProcess, timeout_s: float | None) -> int | None:
    """Returns the exit status; None when the child still runs after the time."""
    waited_s = 0.0
    while child.poll() is None and (timeout_s is None or waited_s < timeout_s):
        await asyncio.sleep(_POLL_S)
        waited_s += _POLL_S
    return child.returncode
