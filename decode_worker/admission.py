"""Says whether a decode worker can take one more sequence: all it needs now, or nothing.

A sequence that holds part of what it needs while it waits for the rest could lock the pool, so
there are no partial holds; and room for the next block of each running sequence stays free.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.request import BlockId, RequestId


class RefusalReason(StrEnum):
    """Why a reservation is refused."""

    NO_ROOM = "no_room"
    """A later try may succeed."""
    TOO_LARGE = "too_large"
    """This worker can never hold the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Blocks that were taken for a sequence."""

    request_id: RequestId
    attempt: int
    block_ids: tuple[BlockId, ...]
    """The whole table: cached blocks, blocks for the rest of the prompt, growth."""
    num_cached_tokens: int
    """Leading tokens whose KV is here: a multiple of the block size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Nothing was taken."""

    reason: RefusalReason
    detail: str
    retry_after_s: float | None
    """When room may be there; None: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockNeed:
    """Blocks of one sequence."""

    num_table_blocks: int
    """Blocks it starts with: those of its known tokens, and one to grow into."""
    num_final_blocks: int
    """Blocks at its longest."""


def block_need(num_tokens: int, max_total_tokens: int, block_size: int) -> BlockNeed:
    """Returns what a sequence needs at its start and at its longest.

    Args:
        num_tokens: tokens known now.
        max_total_tokens: prompt plus the most output; the KV of the last one is never needed.
        block_size: tokens per block.
    """
    raise NotImplementedError


def has_room(num_available: int, num_running: int, num_new_blocks: int) -> bool:
    """Says whether new blocks leave one block for each running sequence to grow into.

    Args:
        num_available: blocks free or evictable, without those of the sequence's own cache hit.
        num_running: sequences that may need their next block.
        num_new_blocks: blocks to take.
    """
    raise NotImplementedError
