"""Steps that were planned and are not completed yet, and the blocks that wait for their end.

    planned --begin--> in flight --land--> completed

A device executes steps in the order of their launch, and a step may be launched while the one
before still runs. A sequence that ends meanwhile (stopped, cancelled, let go) has a slice in
flight that nobody wants any more: its token is ignored, and its blocks are *held* until the newest
step in flight has ended, since that step still reads and writes them. So a block that is free, or
cached without a reference, is used by no step in flight: whoever takes it may fill it at once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.cache.prefix_cache import BlockTable, PrefixCache
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.engine.scheduler import SequenceRoster, SequenceState


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    sequences: tuple[SequenceState, ...]
    """Of the plan's slices, in their order."""
    held: list[BlockTable] = field(default_factory=list)
    """Owns the references of these tables until the step has ended."""


class Flights:
    """The steps in flight of one scheduler, the oldest first. Engine thread only."""

    def __init__(self, cache: PrefixCache, roster: SequenceRoster) -> None:
        """Nothing is in flight."""
        self._cache = cache
        self._roster = roster
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        """Counts steps."""
        return len(self._flights)

    @property
    def num_held_tables(self) -> int:
        """Dropped sequences whose blocks are held."""
        return sum(len(flight.held) for flight in self._flights)

    def held_tables(self) -> Iterator[BlockTable]:
        """Walks over the tables of dropped sequences that steps in flight still use."""
        return (table for flight in self._flights for table in flight.held)

    def begin(self, plan: StepPlan, sequences: Sequence[SequenceState]) -> None:
        """Notes a step that is launched now, made of these sequences in the plan's order."""
        for part, sequence in zip(plan.slices, sequences, strict=True):
            sequence.num_flying += part.num_tokens
        self._flights.append(_Flight(plan, tuple(sequences)))

    def live_slices(self, plan: StepPlan) -> tuple[SequenceSlice, ...]:
        """Returns the slices of a step in flight whose sequences were not dropped since."""
        flight = next(flight for flight in self._flights if flight.plan is plan)
        return tuple(
            part
            for part, sequence in zip(plan.slices, flight.sequences, strict=True)
            if self._roster.is_live(sequence)
        )

    def land(self, plan: StepPlan) -> Iterator[tuple[SequenceSlice, SequenceState]]:
        """Ends the oldest step and frees what it held.

        Yields:
            One after the other, the slices whose sequences were not dropped until then, and these,
            computed by now. The caller takes all of them.
        """
        flight = self._flights.popleft()
        assert flight.plan is plan, "steps end in the order in which they were planned"
        if self._is_copying():
            # Planned after these sequences were dropped, yet a copy may read a block of theirs.
            self._flights[-1].held.extend(flight.held)
        else:
            for table in flight.held:
                self._cache.close(table)
        is_live = self._roster.is_live
        for part, sequence in zip(plan.slices, flight.sequences, strict=True):
            if is_live(sequence):
                end = part.end
                sequence.num_flying -= end - part.start
                sequence.num_computed = end
                yield part, sequence

    def close(self, sequence: SequenceState) -> None:
        """Frees the blocks of a sequence that is dropped, or holds them while they are in use.

        A step that copies blocks may read some of a sequence that is not in it.
        """
        if self._flights and (sequence.num_flying or self._is_copying()):
            self._flights[-1].held.append(sequence.table)
            sequence.table = BlockTable()
        else:
            self._cache.close(sequence.table)

    def _is_copying(self) -> bool:
        return any(flight.plan.copies for flight in self._flights)
