"""All rank processes of a replica: rank 0, which the face talks to, and those that follow it.

Those of the first pipeline stage are children of the face, and so are those of all other stages,
unless these are spread: then each is held by another process on a node of its own.
"""

import asyncio
import logging
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from pdserve.config.engine import EngineConfig
from pdserve.config.load import read_visible_gpus
from pdserve.config.wire import worker_config_to_json
from pdserve.config.worker import WorkerConfig
from pdserve.errors import WorkerLost
from pdserve.face.rank_gpus import deal_gpus
from pdserve.face.rank_process import RankHandlers, RankPlace, RankProcess, start_rank
from pdserve.face.remote_stage import RemoteStage
from pdserve.face.stage_claims import ClaimedStage
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.request import Incarnation, Role
from pdserve.rpc.channel import make_pair
from pdserve.rpc.v1 import inference_pb2, rank_pb2

logger = logging.getLogger(__name__)


class RankGroup:
    """Lives and dies as one: the death of any rank, or of the way to it, ends `run`."""

    def __init__(
        self,
        ranks: tuple[RankProcess, ...],
        stages: tuple[RemoteStage, ...],
        relay: "KeyRelay",
        folder: Path | None,
    ) -> None:
        """Owns the processes, rank 0 first, and the folder in which they meet."""
        self.leader = ranks[0]
        self._ranks = ranks
        self._stages = stages
        self._relay = relay
        self._folder = folder
        self._running: asyncio.Task[None] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks on this machine, in their order."""
        return tuple(rank.child.pid for rank in self._ranks)

    @property
    def num_refused(self) -> int:
        """Connections that the holders of stages have refused."""
        return sum(stage.num_refused for stage in self._stages)

    def describe(self, node: str, tensor_parallel: int) -> list[inference_pb2.RankInfo]:
        """Says where each rank is; `node` is where those of this machine are."""
        found = [(rank.rank, node, rank.child.pid) for rank in self._ranks]
        for stage in self._stages:
            found += [(r, stage.node, pid) for r, pid in zip(stage.ranks, stage.pids, strict=True)]
        return [
            inference_pb2.RankInfo(rank=rank, stage=rank // tensor_parallel, node=where, pid=pid)
            for rank, where, pid in found
        ]

    async def wait_ready(self) -> rank_pb2.RankReady:
        """Returns what rank 0 has to say, once all ranks have loaded.

        Raises:
            ConfigError: a rank could not start for a reason the user can mend.
            WorkerLost: a rank died.
        """
        local = [rank.ready for rank in self._ranks]
        remote = [ready for stage in self._stages for ready in stage.ready]
        # The first to fail counts: the others only miss it.
        ready, *_ = await asyncio.gather(*local, *remote)
        self._remove_folder()
        return ready

    async def wait_lost(self) -> None:
        """Receives until one of them is gone; goes on doing so for others who wait, if cancelled.

        The ranks may have one face after the other.
        """
        if self._running is None:
            self._running = asyncio.create_task(self.run())
        await asyncio.shield(self._running)

    async def change_role(
        self, role: Role, incarnation: Incarnation, handlers: RankHandlers
    ) -> None:
        """Tells drained ranks to go on as another role, for another face; see `wait_ready`.

        Rank 0 tells the others, behind all that it has told them before, and speaks for them.

        Raises:
            WorkerLost: rank 0 died.
        """
        assert not self._stages, "stages on other nodes cannot change their role"
        for rank in self._ranks:
            rank.handlers = replace(handlers, on_key=self._relay.put)
        await self.leader.change_role(role, incarnation)

    async def run(self) -> None:
        """Receives until one of them is gone."""
        jobs = [rank.run() for rank in self._ranks] + [stage.run() for stage in self._stages]
        tasks = [asyncio.create_task(job) for job in (*jobs, self._relay.run())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """Kills them all."""
        for stage in self._stages:
            stage.kill()
        for rank in self._ranks:
            rank.child.kill()

    async def stop(self, timeout_s: float) -> None:
        """Asks rank 0 to end, which ends the others, and kills those that do not."""
        await asyncio.gather(*(rank.stop(timeout_s) for rank in self._ranks))
        for stage in self._stages:
            stage.kill()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._remove_folder()

    def _remove_folder(self) -> None:
        """The ranks have met: kept any longer, a killed face would leave it behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class KeyRelay:
    """Passes what a rank says of its groups on to all others."""

    def __init__(self) -> None:
        """Knows no ranks yet: they are started with it."""
        self._keys: asyncio.Queue[tuple[int, rank_pb2.StoreKey]] = asyncio.Queue()
        self.ranks: Sequence[RankProcess] = ()
        self.stages: Sequence[RemoteStage] = ()

    def put(self, rank: int, key: rank_pb2.StoreKey) -> None:
        """Takes a key of a rank."""
        self._keys.put_nowait((rank, key))

    async def run(self) -> None:
        """Passes on; the loss of a rank shows elsewhere."""
        while True:
            teller, key = await self._keys.get()
            message = rank_pb2.ToRank(key=key)
            with suppress(WorkerLost):
                for local in self.ranks:
                    if local.rank != teller:
                        await local.send(message)
                for stage in self.stages:
                    for rank in stage.ranks:
                        if rank != teller:
                            await stage.tell(rank, message)


async def start_ranks(
    module: str,
    config: WorkerConfig,
    incarnation: Incarnation,
    handlers: RankHandlers,
    stages: Sequence[ClaimedStage] = (),
) -> RankGroup:
    """Starts tensor_parallel x pipeline_parallel processes; call from the loop's (main) thread.

    Args:
        module: what a rank runs, as `python -m module`.
        config: of the replica.
        incarnation: of this life of it.
        handlers: for what rank 0 says.
        stages: on other nodes, in their order; all behind the first. Owned from here on.

    Raises:
        ConfigError: so many ranks cannot share the model or the GPUs; nothing was started.
        WorkerLost: a stage is gone again.
    """
    engine = config.engine
    num_local = engine.num_ranks - len(stages) * engine.tensor_parallel
    relay = KeyRelay()
    with ExitStack() as unless_started:
        for claimed in stages:
            unless_started.callback(claimed.close)
        gpus: tuple[str | None, ...] = (None,) * num_local
        if engine.device == "cuda":
            gpus = deal_gpus(read_visible_gpus(), num_local)
        digest = _digest_of(engine)
        remote = await _start_stages(config, stages, digest, handlers, relay)
        unless_started.pop_all()
    is_alone = engine.num_ranks == 1
    folder = None if is_alone or stages else Path(tempfile.mkdtemp(prefix="pdserve-ranks-"))
    handlers = replace(handlers, on_key=relay.put)
    steps = [connection for claimed in stages for connection in claimed.steps]
    fds = _StepChannels(num_local, steps)
    local = tuple(
        start_rank(
            module,
            config,
            incarnation,
            handlers,
            RankPlace(rank=rank, rank_fds=fds.of(rank), group_folder=folder, gpu=gpus[rank]),
        )
        for rank in range(num_local)
    )
    fds.close()
    relay.ranks, relay.stages = local, remote
    return RankGroup(local, remote, relay, folder)


def _digest_of(engine: EngineConfig) -> bytes:
    """Returns that of the KV's geometry; empty where there is one rank.

    Here already: the ranks would find out as well, after an import of torch each.

    Raises:
        ConfigError: so many ranks cannot share the model.
    """
    if engine.num_ranks == 1:
        return b""
    model = read_model_config(Path(engine.model))
    return geometry_of(model, engine).digest()


async def _start_stages(
    config: WorkerConfig,
    stages: Sequence[ClaimedStage],
    digest: bytes,
    handlers: RankHandlers,
    relay: KeyRelay,
) -> tuple[RemoteStage, ...]:
    """Tells the holders of stages what to run.

    Raises:
        WorkerLost: a stage is gone again.
    """
    remote = tuple(
        RemoteStage(
            stage=claimed.stage,
            ranks=_ranks_of(claimed.stage, config.engine.tensor_parallel),
            node=claimed.node,
            channel=claimed.orders,
            silence_s=config.stage_silence_s,
            on_key=relay.put,
            on_leaving=handlers.on_leaving,
            compatibility_digest=digest,
        )
        for claimed in stages
    )
    for stage in remote:
        # Neither is needed there, and neither should travel.
        told = replace(config, redis_url="", stage_token=None)
        await stage.start(worker_config_to_json(told))
    return remote


class _StepChannels:
    """The channels between rank 0 and all others, while they are handed to the processes."""

    def __init__(self, num_local: int, remote: Sequence[socket.socket]) -> None:
        self._pairs = [make_pair() for _ in range(1, num_local)]
        self._remote = tuple(remote)

    def of(self, rank: int) -> tuple[int, ...]:
        """Returns what a rank inherits: on rank 0 one for each other rank, in their order."""
        if rank > 0:
            return (self._pairs[rank - 1][1].fileno(),)
        local = [leads.fileno() for leads, _ in self._pairs]
        return (*local, *(connection.fileno() for connection in self._remote))

    def close(self) -> None:
        for connection in (*(end for pair in self._pairs for end in pair), *self._remote):
            connection.close()


def _ranks_of(stage: int, tensor_parallel: int) -> range:
    return range(stage * tensor_parallel, (stage + 1) * tensor_parallel)
