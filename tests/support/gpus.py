"""Which GPU each rank of a test gets: one of its own, or one that others have too where few are.

Processes on one GPU take turns there, in slices of about two milliseconds, and a kernel that waits
for another process uses its slice up. That is slow, and right: only NCCL refuses two members on
one device.
"""

import pytest
import torch

from pdserve.config.load import read_visible_gpus


def count_gpus() -> int:
    """Counts those that this process sees."""
    return torch.cuda.device_count()


def gpu_of(rank: int) -> str:
    """Names a rank's GPU, as CUDA_VISIBLE_DEVICES of its process; rank 0 may be this process."""
    return deal_gpu(rank, read_visible_gpus(), count_gpus())


def deal_gpu(rank: int, visible: str | None, num_gpus: int) -> str:
    """Names one of so many GPUs, in turn.

    Args:
        rank: whose it is.
        visible: this process's own CUDA_VISIBLE_DEVICES; None where it is not set.
        num_gpus: that CUDA shows this process; names behind them are of none. Without any, no
            rank sees one.
    """
    if num_gpus == 0:
        return ""
    place = rank % num_gpus
    return str(place) if visible is None else visible.split(",")[place].strip()


def needs_gpus(count: int, why: str) -> pytest.MarkDecorator:
    """Skips what cannot run on fewer."""
    return pytest.mark.skipif(count_gpus() < count, reason=f"needs {count} GPUs: {why}")
