"""Says whether a decode worker can take one more sequence: all it needs now, or nothing.

A sequence that holds part of what it needs while it waits for the rest could lock the pool, so
there are no partial holds; and room for the next block of each running sequence stays free.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pdserve.engine.scheduler import num_blocks_for
from pdserve.request import BlockId, RequestId
from pdserve.timeline import Clock

_MIN_RETRY_S = 0.02
_DEFAULT_RETRY_S = 0.25
_MAX_RETRY_S = 2.0
"""Sequences often end before their limit, so a hint is never long."""


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
    """Blocks it starts with: those of its known tokens, and one for each sample to grow into."""
    num_final_blocks: int
    """Blocks that must exist for it ever to end: those of one sample at its longest."""


def block_need(
    num_tokens: int, max_total_tokens: int, block_size: int, num_samples: int = 1
) -> BlockNeed:
    """Returns what a sequence needs at its start and at its longest.

    Args:
        num_tokens: tokens known now.
        max_total_tokens: prompt plus the most output; the KV of the last one is never needed.
        block_size: tokens per block.
        num_samples: samples that share the known tokens. The first block of its own is, for each,
            a copy of the last shared one or the block behind it.
    """
    num_final = num_blocks_for(max(num_tokens, max_total_tokens - 1), block_size)
    num_table = num_blocks_for(num_tokens, block_size) + num_samples
    if num_samples > 1:
        return BlockNeed(num_table_blocks=num_table, num_final_blocks=max(num_table, num_final))
    return BlockNeed(num_table_blocks=min(num_table, num_final), num_final_blocks=num_final)


def has_room(num_available: int, num_running: int, num_new_blocks: int) -> bool:
    """Says whether new blocks leave one block for each running sequence to grow into.

    Args:
        num_available: blocks free or evictable, without those of the sequence's own cache hit.
        num_running: sequences that may need their next block.
        num_new_blocks: blocks to take.
    """
    return num_available - num_running >= num_new_blocks


class StepPace:
    """How long steps take, for an honest hint to those that are refused."""

    def __init__(self, clock: Clock) -> None:
        """Knows nothing before the first step."""
        self._clock = clock
        self._begun_s: deque[float] = deque()
        self._ended_s: float | None = None
        self._step_s: float | None = None

    def begin_step(self) -> None:
        """Notes the launch of a step; others may still be in flight."""
        self._begun_s.append(self._clock.now())

    def end_step(self) -> None:
        """Books the oldest step into a moving mean: from its launch, or from the end before it."""
        now_s, begun_s = self._clock.now(), self._begun_s.popleft()
        if self._ended_s is not None:
            begun_s = max(begun_s, self._ended_s)
        took_s, self._ended_s = now_s - begun_s, now_s
        self._step_s = took_s if self._step_s is None else 0.8 * self._step_s + 0.2 * took_s

    def note_steps(self, num_steps: int, step_s: float) -> None:
        """Books so many steps that have just ended.

        Args:
            num_steps: steps.
            step_s: mean time of one.
        """
        self._ended_s = self._clock.now()
        old_s = step_s if self._step_s is None else self._step_s
        self._step_s = step_s + 0.8**num_steps * (old_s - step_s)

    def retry_hint_s(self, remaining_tokens: Iterable[int]) -> float:
        """Returns after how long room may be there: when the first running sequence may end.

        Args:
            remaining_tokens: output tokens that each running sequence may still make.
        """
        soonest = min(remaining_tokens, default=None)
        if soonest is None or self._step_s is None:
            return _DEFAULT_RETRY_S
        return min(max(soonest * self._step_s, _MIN_RETRY_S), _MAX_RETRY_S)
