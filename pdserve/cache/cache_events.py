"""What a worker's cache holds, told to any number of routers: numbered events and snapshots. Pure.

    epoch: one life of a worker (its incarnation); sequence numbers count events from 1 in it.
    A reader asks for the events from a number on. Those that the ring has let go of are replaced
    by a snapshot: all keys, and the number that comes next.

A reader keeps nothing here but its own position: a slow one falls behind the ring, and begins anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.cache.cached_granules import GranuleChange

MAX_EVENTS = 1 << 16
"""Kept for readers that were away for a moment."""
MAX_PIECE = 4096
"""Keys in one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePiece:
    """Events in a row, or a part of a snapshot."""

    first_sequence: int
    """Of the first event; in a snapshot, of the first event that it does not include."""
    keys: NDArray[np.uint64]
    is_removed: NDArray[np.bool_]
    """One for each key; all False in a snapshot."""
    snapshot_index: int | None = None
    """Counts the parts of a snapshot, at whose first one all that was known is void."""
    is_last: bool = False
    """Of a snapshot: from here on there are events."""


class CacheEventLog:
    """The present keys and the latest events of one worker; one thread only."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        """Nothing is cached."""
        assert max_events > 0
        self._max_events = max_events
        self._keys: NDArray[np.uint64] = np.zeros(max_events, np.uint64)
        self._is_removed: NDArray[np.bool_] = np.zeros(max_events, np.bool_)
        self._present: dict[int, None] = {}
        self.next_sequence = 1
        """Of the event to come."""
        self._first_sequence = 1
        """Of the oldest event that can be read, if there is one."""

    def __len__(self) -> int:
        """Counts present keys."""
        return len(self._present)

    def append(self, changes: Sequence[GranuleChange]) -> None:
        """Adds events."""
        for key, is_removed in changes:
            slot = self.next_sequence % self._max_events
            self._keys[slot] = key
            self._is_removed[slot] = is_removed
            self.next_sequence += 1
            if is_removed:
                self._present.pop(key, None)
            else:
                self._present[key] = None
        self._first_sequence = max(self._first_sequence, self.next_sequence - self._max_events)

    def clear(self) -> None:
        """Empties the cache at once; readers learn it from a snapshot of nothing."""
        self._present.clear()
        self.next_sequence += 1
        self._first_sequence = self.next_sequence

    def has(self, sequence: int) -> bool:
        """Says whether a reader can go on with this event, or wait for it."""
        return self._first_sequence <= sequence <= self.next_sequence

    def read(self, sequence: int, max_piece: int = MAX_PIECE) -> CachePiece:
        """Returns the events from a number on, which `has` has told to be there."""
        assert self.has(sequence)
        end = min(self.next_sequence, sequence + max_piece)
        slots = np.arange(sequence, end) % self._max_events
        return CachePiece(
            first_sequence=sequence, keys=self._keys[slots], is_removed=self._is_removed[slots]
        )

    def snapshot(self, max_piece: int = MAX_PIECE) -> Iterator[CachePiece]:
        """Yields all keys as of now, prefixes before what extends them; there is a piece always.

        Events that come while the pieces are taken are not in them.
        """
        keys = np.fromiter(self._present, np.uint64, len(self._present))
        return _cut_snapshot(keys, self.next_sequence, max_piece)


def _cut_snapshot(
    keys: NDArray[np.uint64], next_sequence: int, max_piece: int
) -> Iterator[CachePiece]:
    for index, start in enumerate(range(0, max(len(keys), 1), max_piece)):
        part = keys[start : start + max_piece]
        yield CachePiece(
            first_sequence=next_sequence,
            keys=part,
            is_removed=np.zeros(len(part), np.bool_),
            snapshot_index=index,
            is_last=start + max_piece >= len(keys),
        )
