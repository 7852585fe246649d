"""Which GPU each rank of a replica sees: its own, and no other. Pure."""

from pdserve.errors import ConfigError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def deal_gpus(visible: str | None, num_ranks: int) -> tuple[str, ...]:
    """Names the GPU of each rank, in the order of the ranks.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the face; None, where it is not set, stands for all GPUs.
        num_ranks: that the face starts on its machine.

    Raises:
        ConfigError: fewer are visible than there are ranks.
    """
    if visible is None:
        return tuple(str(rank) for rank in range(num_ranks))
    names = tuple(name for name in (part.strip() for part in visible.split(",")) if name)
    if len(names) < num_ranks:
        raise ConfigError(
            f"device cuda: {num_ranks} ranks need a GPU each, and {VISIBLE_GPUS} shows "
            f"{len(names)} ({visible})",
            settings=("device",),
        )
    return names[:num_ranks]
