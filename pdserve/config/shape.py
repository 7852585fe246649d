"""How the ranks of a replica share a model: layers over stages, KV heads over tensor ranks.

Rank `stage * tensor_parallel + tensor_rank` holds the layers of its stage and the KV heads of its
tensor rank. With more tensor ranks than KV heads, neighbouring ranks hold the same head.
"""

from dataclasses import dataclass

from pdserve.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one value in memory."""
SCALED_DTYPE = "fp8"
"""On the wire alone: values of one byte, e4m3, and a float32 scale for each head of each token."""
WIRE_BYTES = {**ITEM_BYTES, SCALED_DTYPE: 1}
"""Bytes of one value in a frame."""
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShape:
    """What may differ between two workers that exchange KV."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    block_size: int
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """What one rank holds."""

    rank: int
    stage: int
    tensor_rank: int
    layers: range
    """Of the model."""
    kv_heads: range
    """Of the model."""


def count_value_bytes(num_rows: int, head_dim: int, dtype: str) -> int:
    """Returns the bytes of a frame's values, `num_rows` heads of keys or values; whole words."""
    return -(-num_rows * head_dim * WIRE_BYTES[dtype] // SCALE_BYTES) * SCALE_BYTES


def count_frame_bytes(num_rows: int, head_dim: int, dtype: str) -> int:
    """Returns the bytes of a frame: its values, then the scales of all rows if it has any."""
    scales = num_rows * SCALE_BYTES if dtype == SCALED_DTYPE else 0
    return count_value_bytes(num_rows, head_dim, dtype) + scales


def split_evenly(count: int, num_parts: int) -> tuple[range, ...]:
    """Cuts [0, count) into contiguous ranges; the first ones get what does not divide."""
    size, num_larger = divmod(count, num_parts)
    ranges: list[range] = []
    start = 0
    for part in range(num_parts):
        stop = start + size + (part < num_larger)
        ranges.append(range(start, stop))
        start = stop
    return tuple(ranges)


def check_parallel(
    *,
    num_layers: int,
    num_kv_heads: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    num_heads: int | None = None,
) -> None:
    """Checks that the ranks can share a model.

    Args:
        num_layers: of the model.
        num_kv_heads: of the model.
        tensor_parallel: divides the KV heads, or is a multiple of them that divides the heads.
        pipeline_parallel: stages; each needs a layer.
        num_heads: query heads; None where they are not known.

    Raises:
        ConfigError: names the field that does not fit, with its limit.
    """
    for name, value in (
        ("tensor_parallel", tensor_parallel),
        ("pipeline_parallel", pipeline_parallel),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", settings=(name,))
    if num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel must divide the {num_kv_heads} KV heads or be a multiple of them, "
            f"got {tensor_parallel}",
            settings=("tensor_parallel",),
        )
    if num_heads is not None and num_heads % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel must divide the {num_heads} heads, got {tensor_parallel}",
            settings=("tensor_parallel",),
        )
    if pipeline_parallel > num_layers:
        raise ConfigError(
            f"pipeline_parallel must be at most the {num_layers} layers, got {pipeline_parallel}",
            settings=("pipeline_parallel",),
        )


def split_kv_heads(num_kv_heads: int, tensor_parallel: int) -> tuple[range, ...]:
    """Returns the KV heads of each tensor rank, for sizes that `check_parallel` lets pass."""
    if num_kv_heads % tensor_parallel == 0:
        return split_evenly(num_kv_heads, tensor_parallel)
    num_replicas = tensor_parallel // num_kv_heads
    heads = (rank // num_replicas for rank in range(tensor_parallel))
    return tuple(range(head, head + 1) for head in heads)


def split_model(
    *, num_layers: int, num_kv_heads: int, tensor_parallel: int, pipeline_parallel: int
) -> tuple[RankPart, ...]:
    """Returns every rank's part, ordered by rank.

    Raises:
        ConfigError: the sizes do not fit, see `check_parallel`.
    """
    check_parallel(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    heads = split_kv_heads(num_kv_heads, tensor_parallel)
    return tuple(
        RankPart(
            rank=stage * tensor_parallel + tensor_rank,
            stage=stage,
            tensor_rank=tensor_rank,
            layers=layers,
            kv_heads=heads[tensor_rank],
        )
        for stage, layers in enumerate(split_evenly(num_layers, pipeline_parallel))
        for tensor_rank in range(tensor_parallel)
    )
