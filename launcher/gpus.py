"""Which GPU of this machine each replica gets."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

DEVICE_FOLDER = Path("/dev")
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
