"""How far each holder of a prompt's first granule has it, read off the sets of its granules.

Whoever has a granule mostly has all before it, but events of a moment ago may be missing: a holder
counts up to the first granule that it lacks.
"""

import numpy as np
from numpy.typing import NDArray

from router.holder_sets import MAX_ROWS, HolderSets, Sets, Slots, count_bits, unpack_maps

Lengths = tuple[Slots, Slots]
"""Rows, and how many leading granules of a prompt each has."""

NO_LENGTHS: Lengths = (np.zeros(0, np.int64), np.zeros(0, np.int64))

_SHORT = 24
_EARLY = 64
"""Where whoever lacks a few granules at random has mostly missed one."""


class LengthMeter:
    """Measures with arrays that are made once."""

    def __init__(self, holder_sets: HolderSets) -> None:
        """Reads these sets."""
        self._sets = holder_sets
        self._marks = np.zeros(MAX_ROWS + 1, np.uint16)
        """A bit for each row that is asked for, during a call."""
        self._tails = np.zeros(MAX_ROWS + 1, np.int64)
        """By rows: what comes on top, during a call."""

    def measure(self, sets: Sets) -> Lengths:
        """Returns the rows of the first set, and in how many sets from there on each is."""
        num_maps = self._sets.count_leading_maps(sets)
        if num_maps == 0:
            return self._measure_few(sets)
        rows, lengths = self._measure_many(sets[:num_maps])
        if num_maps < len(sets):
            tail = sets[num_maps:]
            is_short = len(tail) <= _SHORT
            few, tails = self._measure_short(tail) if is_short else self._measure_few(tail)
            self._tails[few] = tails
            lengths += self._tails[rows] * (lengths == num_maps)
            self._tails[few] = 0
        return rows, lengths

    def _measure_short(self, sets: Sets) -> Lengths:
        """Does as `_measure_few`, in less time for so few sets than its many steps take."""
        lengths = dict.fromkeys(self._sets.rows_in(sets.item(0)), 1)
        for number, one in enumerate(sets.tolist()):
            for row in self._sets.rows_in(one):
                if lengths.get(row) == number:
                    lengths[row] += 1
        return np.array(list(lengths)), np.array(list(lengths.values()))

    def _measure_few(self, sets: Sets) -> Lengths:
        """Measures sets of which the first is a list."""
        lines = self._sets.lists_of(sets)
        rows = lines[0][lines[0] != MAX_ROWS]
        bits = np.uint16(1) << np.arange(len(rows), dtype=np.uint16)
        self._marks[rows] = bits
        # Transposed, for numpy is slow at joining few at a time.
        masks = np.ascontiguousarray(self._marks.take(lines).T)
        self._marks[rows] = 0
        held = np.bitwise_or.reduce(masks, axis=0) | self._sets.mark_maps(sets, rows)
        # Behind the last set is one of nobody.
        held = np.append(np.bitwise_and.accumulate(held), np.uint16(0))
        return rows.astype(np.int64), ((held & bits[:, None]) == 0).argmax(axis=1)

    def _measure_many(self, sets: Sets) -> Lengths:
        """Measures sets that are all maps."""
        maps = self._sets.maps_of(sets)
        num_rows = count_bits(maps[0])
        last, rows = unpack_maps(_changes(maps), num_rows)
        if len(rows) != num_rows:
            # Somebody has what extends a prefix but not all of the prefix, for else each row of the
            # first map ends once and no other comes: rare.
            last, rows = unpack_maps(_changes(_held(maps)))
        return rows, last + 1


def _changes(maps: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns what changes behind each map; behind the last one all end."""
    changes = np.empty_like(maps)
    np.bitwise_xor(maps[:-1], maps[1:], out=changes[:-1])
    changes[-1] = maps[-1]
    return changes


def _held(maps: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns who has each map and all before it; up to one of nobody, if that comes early."""
    held: NDArray[np.uint64] = np.bitwise_and.accumulate(maps[:_EARLY], axis=0)
    if len(maps) > _EARLY and held[-1].any():
        held = np.bitwise_and.accumulate(maps, axis=0)
    return held
