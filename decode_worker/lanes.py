"""Splits the running sequences of a pipeline into as many batches as it has stages.

    lane 0:  steps k, k+2, k+4 ...     while stage 1 computes a step of one lane, stage 0 computes
    lane 1:  steps k+1, k+3, ...       one of the other: a lane needs its tokens back in between

A sequence keeps its lane, and lanes differ in size by one at most: one that outgrows the others
gives its youngest sequence away, which flies out first. Pure.
"""

from collections import deque
from collections.abc import Sequence

from pdserve.engine.scheduler import SequenceState


class Lanes:
    """Who runs in which lane, and whose turn it is. Engine thread only."""

    def __init__(self, num_lanes: int) -> None:
        """Starts with the first lane."""
        self._turns = deque(range(num_lanes))

    @property
    def turns(self) -> tuple[int, ...]:
        """All lanes, the one that was planned longest ago first."""
        return tuple(self._turns)

    def note(self, lane: int) -> None:
        """Notes that a step of a lane is launched now."""
        self._turns.remove(lane)
        self._turns.append(lane)

    def settle(self, running: Sequence[SequenceState]) -> None:
        """Gives newcomers a lane, and evens lanes out.

        Args:
            running: the oldest first.
        """
        sizes = [0] * len(self._turns)
        newcomers: list[SequenceState] = []
        for sequence in running:
            if sequence.lane is None:
                newcomers.append(sequence)
            else:
                sizes[sequence.lane] += 1
        for sequence in newcomers:
            self._seat(sequence, sizes)
        while max(sizes) - min(sizes) > 1:
            largest = sizes.index(max(sizes))
            youngest = next(one for one in reversed(running) if one.lane == largest)
            youngest.lane = None
            sizes[largest] -= 1
            self._seat(youngest, sizes)

    def _seat(self, sequence: SequenceState, sizes: list[int]) -> None:
        """Counts a sequence into the smallest lane; it is in none while it is still in flight."""
        # Of lanes alike, the one whose turn is next.
        smallest = min(self._turns, key=sizes.__getitem__)
        sizes[smallest] += 1
        if sequence.num_flying == 0:
            sequence.lane = smallest
