"""Which GPU of this machine each replica gets."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pdserve.errors import ConfigError

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


def pick_gpu(gpus: Sequence[str], taken: Sequence[str]) -> str | None:
    """Returns the GPU that the fewest replicas have, the first of them; None where there is none.

    Args:
        gpus: all of them.
        taken: the GPU of each replica that runs.
    """
    counts = Counter(taken)
    return min(gpus, key=lambda gpu: counts[gpu], default=None)


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
