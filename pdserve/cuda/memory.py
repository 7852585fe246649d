"""How many KV blocks a GPU has room for, once all else is there. Pure."""

from dataclasses import dataclass

from pdserve.errors import ConfigError

MIN_BLOCKS = 2
GIB = 1 << 30
MARGIN_BYTES = 256 << 20
"""Left free: libraries and the driver allocate now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPicture:
    """A GPU's memory before its KV is allocated."""

    total_bytes: int
    free_bytes: int
    own_bytes: int
    """Taken by this process: weights, workspace, buffers."""
    passing_bytes: int
    """Taken and given back within a step, at most."""
    graph_bytes: int
    """What graphs will take, as one of them has."""
    link_bytes: int = 0
    """What links may take later."""
    utilization: float
    """Share of the total that this process may take."""

    @property
    def kv_bytes(self) -> int:
        """What is left for KV, not below 0."""
        allowed = int(self.total_bytes * self.utilization) - self.own_bytes
        room = min(allowed, self.free_bytes - MARGIN_BYTES)
        room -= self.passing_bytes + self.graph_bytes + self.link_bytes
        return max(0, room)


def fit_blocks(
    picture: MemoryPicture,
    *,
    block_bytes: int,
    block_size: int,
    wished_bytes: int | None,
    wished_tokens: int | None,
) -> int:
    """Returns how many KV blocks to allocate.

    Args:
        picture: the GPU's memory.
        block_bytes: of one block over all layers.
        block_size: tokens of a block.
        wished_bytes: what the user gave for KV; None takes all there is.
        wished_tokens: the longest sequence that the user asked for; None takes what fits.

    Raises:
        ConfigError: it is too little; the text says how much would fit.
    """
    room = picture.kv_bytes
    if wished_bytes is not None and wished_bytes > room:
        raise ConfigError(
            f"kv_cache_memory_bytes must be at most {room} bytes, what weights, graphs and buffers "
            f"leave of {_gib(picture.total_bytes)} at gpu_memory_utilization "
            f"{picture.utilization}, got {wished_bytes}",
            settings=("kv_cache_memory_bytes", "gpu_memory_utilization"),
        )
    num_blocks = (room if wished_bytes is None else wished_bytes) // block_bytes
    num_tokens = num_blocks * block_size
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"KV needs at least {MIN_BLOCKS * block_bytes} bytes ({MIN_BLOCKS} blocks), "
            f"{room} are left: {_gib(picture.free_bytes)} free of {_gib(picture.total_bytes)}, "
            f"{_gib(picture.own_bytes)} taken by weights and buffers, at gpu_memory_utilization "
            f"{picture.utilization}",
            settings=("gpu_memory_utilization",),
        )
    if wished_tokens is not None and num_tokens < wished_tokens:
        raise ConfigError(
            f"max_model_len must be at most {num_tokens}, the tokens that {num_blocks} KV blocks "
            f"of {block_bytes} bytes hold, got {wished_tokens}",
            settings=("max_model_len",),
        )
    return num_blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
