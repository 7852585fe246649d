"""All rank processes of a replica: rank 0, which the face talks to, and those that follow it."""

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

from pdserve.config.load import read_visible_gpus
from pdserve.config.worker import WorkerConfig
from pdserve.face.rank_gpus import deal_gpus
from pdserve.face.rank_process import RankHandlers, RankPlace, RankProcess, start_rank
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.request import Incarnation
from pdserve.rpc.channel import make_pair
from pdserve.rpc.v1 import rank_pb2

logger = logging.getLogger(__name__)


class RankGroup:
    """Lives and dies as one: the death of any rank ends `run`."""

    def __init__(self, ranks: tuple[RankProcess, ...], folder: Path | None) -> None:
        """Owns the processes, rank 0 first, and the folder in which they met."""
        self.leader = ranks[0]
        self._ranks = ranks
        self._folder = folder

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks, in their order."""
        return tuple(rank.child.pid for rank in self._ranks)

    async def wait_ready(self) -> rank_pb2.RankReady:
        """Returns what rank 0 has to say, once all ranks have loaded.

        Raises:
            ConfigError: a rank could not start for a reason the user can mend.
            WorkerLost: a rank died.
        """
        # The first to fail counts: the others only miss it.
        ready, *_ = await asyncio.gather(*(rank.ready for rank in self._ranks))
        self._remove_folder()
        return ready

    async def run(self) -> None:
        """Receives until one of them is gone."""
        tasks = [asyncio.create_task(rank.run()) for rank in self._ranks]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """Kills them all."""
        for rank in self._ranks:
            rank.child.kill()

    async def stop(self, timeout_s: float) -> None:
        """Asks rank 0 to end, which ends the others, and kills those that do not."""
        await asyncio.gather(*(rank.stop(timeout_s) for rank in self._ranks))
        self._remove_folder()

    def _remove_folder(self) -> None:
        """The ranks have met: kept any longer, a killed face would leave it behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def start_ranks(
    module: str, config: WorkerConfig, incarnation: Incarnation, handlers: RankHandlers
) -> RankGroup:
    """Starts tensor_parallel x pipeline_parallel processes; call from the loop's (main) thread.

    Raises:
        ConfigError: so many ranks cannot share the model or the GPUs; nothing was started.
    """
    num_ranks = config.engine.num_ranks
    gpus: tuple[str | None, ...] = (None,) * num_ranks
    if config.engine.device == "cuda":
        gpus = deal_gpus(read_visible_gpus(), num_ranks)
    if num_ranks == 1:
        place = RankPlace(gpu=gpus[0])
        return RankGroup((start_rank(module, config, incarnation, handlers, place),), None)
    # Here already: the ranks would find out as well, after an import of torch each.
    geometry_of(read_model_config(Path(config.engine.model)), config.engine)
    folder = Path(tempfile.mkdtemp(prefix="pdserve-ranks-"))
    pairs = [make_pair() for _ in range(1, num_ranks)]
    fds_of = [tuple(leads.fileno() for leads, _ in pairs)]
    fds_of += [(follows.fileno(),) for _, follows in pairs]
    ranks = tuple(
        start_rank(
            module,
            config,
            incarnation,
            handlers,
            RankPlace(rank=rank, rank_fds=fds, group_folder=folder, gpu=gpus[rank]),
        )
        for rank, fds in enumerate(fds_of)
    )
    for ends in pairs:
        for end in ends:
            end.close()
    return RankGroup(ranks, folder)
