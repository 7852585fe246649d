"""Where a piece of one sequence's KV lies: the words in which frames are packed and scattered."""

from dataclasses import dataclass

from pdserve.request import BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class KvRegion:
    """Consecutive tokens of one sequence in some layers and KV heads, and their dtype in a frame.

    A frame holds them in the order layer, K or V, token, head, dim: nothing of it tells of the
    block size of the memory that it came from.
    """

    block_ids: tuple[BlockId, ...]
    """The blocks that hold the tokens, in order."""
    offset: int
    """Slot of the first token in the first block."""
    num_tokens: int
    layers: range
    """Of the model, not of the rank."""
    heads: range
    """KV heads of the model."""
    dtype: str
    """Of the values in the frame."""


def make_region(
    *,
    table: tuple[BlockId, ...],
    block_size: int,
    tokens: range,
    layers: range,
    heads: range,
    dtype: str,
) -> KvRegion:
    """Looks the blocks of some tokens up in a sequence's block table."""
    first, last = tokens.start // block_size, -(-tokens.stop // block_size)
    return KvRegion(
        block_ids=tuple(table[first:last]),
        offset=tokens.start % block_size,
        num_tokens=len(tokens),
        layers=layers,
        heads=heads,
        dtype=dtype,
    )
