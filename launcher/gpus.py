"""Which GPU of this machine each rank of each replica gets."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pdserve.config.engine import EngineConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

DEVICE_FOLDER = Path("/dev")
WSL_DEVICE = "dxg"
"""All GPUs of a Windows host, which have no files of their own."""
_DEVICE_FILE = re.compile(r"nvidia(\d+)")


def find_gpus(visible: str | None, device_folder: Path = DEVICE_FOLDER) -> tuple[str, ...]:
    """Names the GPUs that replicas may use, as CUDA_VISIBLE_DEVICES does.

    Args:
        visible: this process's own CUDA_VISIBLE_DEVICES, which wins; None where it is not set.
        device_folder: where the driver puts a file for each.
    """
    if visible is not None:
        return tuple(name for name in (part.strip() for part in visible.split(",")) if name)
    if not device_folder.is_dir():
        return ()
    found = (_DEVICE_FILE.fullmatch(entry.name) for entry in device_folder.iterdir())
    return tuple(sorted((match[1] for match in found if match), key=int))


def pick_gpus(gpus: Sequence[str], taken: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """Returns a GPU for each rank of a replica: the first of those that the fewest ranks have.

    Ranks of one replica never share a GPU; ranks of several replicas do where there are too few.

    Args:
        gpus: all of them, at least as many as ranks: see `check_gpus`.
        taken: the GPU of each rank that runs.
        num_ranks: of the replica.
    """
    counts = Counter(taken)
    assert num_ranks <= len(gpus), "check_gpus comes first"
    picked = sorted(gpus, key=lambda gpu: counts[gpu])[:num_ranks]
    return tuple(gpu for gpu in gpus if gpu in picked)


def check_gpus(role: Role, engine: EngineConfig, gpus: Sequence[str]) -> None:
    """Checks that each rank of a replica can have a GPU of its own.

    Raises:
        ConfigError: there are too few; the text says how many are needed and which are there.
    """
    if engine.device != "cuda" or engine.num_ranks <= len(gpus):
        return
    ranks = (
        "a GPU"
        if engine.num_ranks == 1
        else f"{engine.num_ranks} GPUs, one for each of {engine.tensor_parallel} tensor ranks in "
        f"{engine.pipeline_parallel} stages"
    )
    found = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none (CUDA_VISIBLE_DEVICES names them)"
    raise ConfigError(f"device cuda: a {role} replica needs {ranks}; this machine shows {found}")


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
