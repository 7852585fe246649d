"""Which row of the device's block tables belongs to which sequence, and what is written there.

Sequences keep their row while they run, so that a step sends what is new of a table and no more.
Rows in use are always the first ones: when some sequences end, the last ones move up. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.batch import SequenceSlice
from pdserve.request import BlockId, Request, RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRun:
    """Blocks to write into a row, from an index on."""

    row: int
    first: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """Where the slices of a step sit."""

    rows: list[int]
    """One for each slice, a permutation of [0, number of slices)."""
    runs: list[TableRun]
    """What the tables lack."""


class RowBook:
    """The rows of one kind of sequences. Slices must be taken by the device in order of calls."""

    def __init__(self, max_rows: int) -> None:
        """Starts with rows of which nothing is known."""
        self._row_of: dict[RequestId, int] = {}
        self._requests: list[Request | None] = [None] * max_rows
        self._tables: list[tuple[BlockId, ...]] = [()] * max_rows

    def seats(self, request_id: RequestId | None) -> bool:
        """Says whether a request was among those seated last."""
        return request_id in self._row_of

    def seat(self, parts: Sequence[SequenceSlice]) -> Seats:
        """Gives each slice a row."""
        count = len(parts)
        row_of = self._row_of
        rows = [row_of.get(part.request.request_id, count) for part in parts]
        if len(row_of) != count or (count and max(rows) >= count):
            self._move(parts, rows)
        runs: list[TableRun] = []
        for part, row in zip(parts, rows, strict=True):
            if self._tables[row] is not part.block_ids or self._requests[row] is not part.request:
                self._note(part, row, runs)
        return Seats(rows=rows, runs=runs)

    def _move(self, parts: Sequence[SequenceSlice], rows: list[int]) -> None:
        """Finds rows for those that have none among the first, and forgets who left."""
        count = len(parts)
        taken = {row for row in rows if row < count}
        free = (row for row in range(count) if row not in taken)
        for index, row in enumerate(rows):
            if row >= count:
                rows[index] = next(free)
        self._row_of = {part.request.request_id: row for part, row in zip(parts, rows, strict=True)}

    def _note(self, part: SequenceSlice, row: int, runs: list[TableRun]) -> None:
        known = self._tables[row] if self._requests[row] is part.request else ()
        wanted = part.block_ids
        first = len(known)
        if wanted[:first] != known:
            # Another sequence, or a shared block that was copied before it was written to.
            shorter = min(first, len(wanted))
            first = next((i for i in range(shorter) if known[i] != wanted[i]), shorter)
        if first < len(wanted):
            runs.append(TableRun(row=row, first=first, block_ids=wanted[first:]))
        self._requests[row], self._tables[row] = part.request, wanted
