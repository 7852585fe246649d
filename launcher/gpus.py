"""Which GPU of this machine each rank of each replica gets."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

DEVICE_FOLDER = Path("/dev")
WSL_DEVICE = "dxg"
"""All GPUs of a Windows host, which have no files of their own."""
_DEVICE_FILE = re.compile(r"nvidia\d+")


def find_gpus(visible: str | None, device_folder: Path = DEVICE_FOLDER) -> tuple[str, ...]:
    """Names the GPUs that replicas may use, as CUDA_VISIBLE_DEVICES does.

    Args:
        visible: this process's own CUDA_VISIBLE_DEVICES, which wins; None where it is not set.
        device_folder: where the driver puts a file for each. CUDA counts those that are there from
            0 on, whatever the files' numbers: a container may have only some.
    """
    if visible is not None:
        return tuple(name for name in (part.strip() for part in visible.split(",")) if name)
    if not device_folder.is_dir():
        return ()
    count = sum(bool(_DEVICE_FILE.fullmatch(entry.name)) for entry in device_folder.iterdir())
    return tuple(str(index) for index in range(count))


def pick_gpus(gpus: Sequence[str], taken: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """Returns a GPU for each rank of a replica: the first of those that the fewest ranks have.

    Ranks of one replica never share a GPU; ranks of several replicas do where there are too few.

    Args:
        gpus: all of them, at least as many as ranks: see `check_gpus`.
        taken: the GPU of each rank that runs.
        num_ranks: of the replica.
    """
    counts = Counter(taken)
    assert not gpus or num_ranks <= len(gpus), "check_gpus comes first"
    picked = sorted(gpus, key=lambda gpu: counts[gpu])[:num_ranks]
    return tuple(gpu for gpu in gpus if gpu in picked)


def check_gpus(role: Role, engine: EngineConfig, num_ranks: int, gpus: Sequence[str]) -> None:
    """Checks that each rank of a replica can have a GPU of its own, on a machine that has some.

    Args:
        role: of the replica.
        engine: likewise.
        num_ranks: of the replica on this machine.
        gpus: of this machine; none where they have no names.

    Raises:
        ConfigError: there are too few; the text says how many are needed and which are there.
    """
    if engine.device != "cuda" or not gpus or num_ranks <= len(gpus):
        return
    raise ConfigError(
        f"--device cuda: a {role} replica of {engine.tensor_parallel} tensor ranks in "
        f"{engine.pipeline_parallel} stages needs {num_ranks} GPUs here, one a rank; this machine "
        f"shows {len(gpus)} ({', '.join(gpus)})"
    )


def check_has_gpu(visible: str | None, device_folder: Path = DEVICE_FOLDER) -> None:
    """Refuses a machine where `--device cuda` cannot work; what else CUDA lacks, replicas tell.

    Raises:
        ConfigError: there is no GPU, or none is visible.
    """
    if find_gpus(visible, device_folder):
        return
    if visible is not None:
        raise ConfigError("--device cuda needs a GPU, but CUDA_VISIBLE_DEVICES shows none")
    if not (device_folder / WSL_DEVICE).exists():
        raise ConfigError("--device cuda needs a GPU, and this machine has none")


class GpuDealer:
    """Gives each replica of this machine the GPUs of its ranks; it keeps them over restarts."""

    def __init__(self, visible: str | None) -> None:
        """Takes this process's own CUDA_VISIBLE_DEVICES; None where it is not set."""
        self._visible = visible
        self._gpus = find_gpus(visible)
        self._dealt: dict[str, tuple[str, ...]] = {}

    def check(self, config: ClusterConfig) -> None:
        """Checks, before anything is started, that there are enough for each replica.

        Raises:
            ConfigError: there are too few, or none.
        """
        if config.engine.device == "cuda":
            check_has_gpu(self._visible)
        engines = {Role.DECODE: config.decode_engine}
        if config.num_prefill:
            engines[Role.PREFILL] = config.engine
        for role, engine in engines.items():
            num_ranks = engine.tensor_parallel if config.spread_stages else engine.num_ranks
            check_gpus(role, engine, num_ranks, self._gpus)

    def deal(self, worker: WorkerConfig) -> dict[str, str]:
        """Returns the variable that shows a replica its GPUs, and no other."""
        if worker.engine.device != "cuda" or not self._gpus:
            return {}
        taken = [gpu for gpus in self._dealt.values() for gpu in gpus]
        gpus = pick_gpus(self._gpus, taken, worker.num_local_ranks)
        self._dealt[worker.worker_id] = gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    def keep(self, worker_ids: Collection[str]) -> None:
        """Takes back what others have."""
        self._dealt = {name: gpus for name, gpus in self._dealt.items() if name in worker_ids}
