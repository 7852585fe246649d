"""Sets of worker rows, each named by 32 bits: the one row itself, a short list, or a bit map.

    kind 0: the row of the only worker     kinds 1, 2: a list of up to 4 or 16 rows     kind 3: bits

All calls work on arrays; of the sets in one call, no two are the same stored set.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint16]
Sets = NDArray[np.uint32]
Slots = NDArray[np.int64]
Bits = NDArray[np.bool_]

MAX_ROWS = 0xFFFF
_NOBODY = 0xFFFF
_KIND_SHIFT = 30
_SLOT_MASK = (1 << _KIND_SHIFT) - 1
_LIST_SIZES = {1: 4, 2: 16}
_MAP = 3
_FIRST_MAP = np.uint32(_MAP << _KIND_SHIFT)
_SHRINKS_AT = {2: 2, _MAP: 8}
"""So many members move to the kind before: half of what it holds, so that few go back and forth."""
_FIRST_WORDS = 16
_PIECE_BYTES = 1 << 22
"""That stored sets get room for at once, beyond what is asked for."""


class _Slab:
    """Stored sets of one size, with a stack of those that are free."""

    def __init__(self, width: int, fill: np.uint16 | np.uint64) -> None:
        self._fill = fill
        self.items: NDArray[Any] = np.full((0, width), fill)
        """[slots, width], of the type of `fill`."""
        self._freed = np.zeros(0, np.uint32)
        self._num_freed = 0
        self._num_made = 0

    @property
    def num_bytes(self) -> int:
        return int(self.items.nbytes + self._freed.nbytes)

    def take(self, count: int) -> Slots:
        """Returns free slots, emptied."""
        num_reused = min(count, self._num_freed)
        self._num_freed -= num_reused
        reused = self._freed[self._num_freed : self._num_freed + num_reused].astype(np.int64)
        end = self._num_made + count - num_reused
        if end > len(self.items):
            assert end <= _SLOT_MASK, "the index is full"
            _lengthen(self.items, end)
        slots = np.concatenate((reused, np.arange(self._num_made, end)))
        self._num_made = end
        self.items[slots] = self._fill
        return slots

    def give(self, slots: Slots) -> None:
        """Takes slots back."""
        end = self._num_freed + len(slots)
        if end > len(self._freed):
            _lengthen(self._freed, end)
        self._freed[self._num_freed : end] = slots
        self._num_freed = end

    def widen(self, width: int) -> None:
        added = np.full((len(self.items), width - self.items.shape[1]), self._fill)
        self.items = np.concatenate((self.items, added), axis=1)


@dataclass(frozen=True, slots=True)
class Removal:
    """What is left of sets that lost rows."""

    sets: Sets
    num_removed: NDArray[np.int64]
    is_empty: Bits
    """Nobody is left: the set is gone."""


class HolderSets:
    """Stores all sets of an index."""

    def __init__(self) -> None:
        """Stores nothing."""
        self._lists = {kind: _Slab(size, np.uint16(_NOBODY)) for kind, size in _LIST_SIZES.items()}
        self._maps = _Slab(_FIRST_WORDS, np.uint64(0))

    @property
    def num_bytes(self) -> int:
        """Memory of the stored sets."""
        return self._maps.num_bytes + sum(slab.num_bytes for slab in self._lists.values())

    @property
    def num_words(self) -> int:
        """Of 64 rows, in a bit map."""
        return int(self._maps.items.shape[1])

    def admit(self, row: int) -> None:
        """Makes room for rows up to this one."""
        assert row < MAX_ROWS
        if row >= 64 * self.num_words:
            self._maps.widen(max(row // 64 + 1, 2 * self.num_words))

    def add(self, sets: Sets, rows: Rows) -> tuple[Sets, Bits]:
        """Adds a row to each set; returns the sets, and for which of them the row was new."""
        result, is_new = sets.copy(), np.zeros(len(sets), np.bool_)
        kinds = sets >> _KIND_SHIFT
        where = np.flatnonzero((kinds == 0) & (sets != rows))
        if len(where):
            slots = self._lists[1].take(len(where))
            self._lists[1].items[slots, 0] = sets[where]
            self._lists[1].items[slots, 1] = rows[where]
            result[where] = _name(1, slots)
            is_new[where] = True
        for kind in _LIST_SIZES:
            where = np.flatnonzero(kinds == kind)
            if len(where):
                is_new[where] = self._add_to_lists(kind, where, sets, rows, result)
        where = np.flatnonzero(kinds == _MAP)
        if len(where):
            slots = (sets[where] & _SLOT_MASK).astype(np.int64)
            words, bits = _bits_of(rows[where])
            is_new[where] = (self._maps.items[slots, words] & bits) == 0
            self._maps.items[slots, words] |= bits
        return result, is_new

    def _add_to_lists(
        self, kind: int, where: Slots, sets: Sets, rows: Rows, result: Sets
    ) -> NDArray[np.bool_]:
        slab = self._lists[kind]
        slots = (sets[where] & _SLOT_MASK).astype(np.int64)
        members = slab.items[slots]
        added = rows[where]
        is_new: Bits = ~(members == added[:, None]).any(axis=1)
        is_free = members == _NOBODY
        has_room = is_free.any(axis=1)
        fits = is_new & has_room
        slab.items[slots[fits], is_free[fits].argmax(axis=1)] = added[fits]
        grows = is_new & ~has_room
        if grows.any():
            more = np.concatenate((members[grows], added[grows, None]), axis=1)
            slab.give(slots[grows])
            result[where[grows]] = self._store(kind + 1, more)
        return is_new

    def remove(self, sets: Sets, rows: Rows) -> Removal:
        """Removes a row from each set; some do not have it."""
        loss = Removal(sets.copy(), np.zeros(len(sets), np.int64), np.zeros(len(sets), np.bool_))
        kinds = sets >> _KIND_SHIFT
        self._lose_singles((kinds == 0) & (sets == rows), loss)
        for kind, slab in self._lists.items():
            where = np.flatnonzero(kinds == kind)
            if len(where):
                slots = (sets[where] & _SLOT_MASK).astype(np.int64)
                members = slab.items.take(slots, axis=0)
                self._lose_members(kind, where, members == rows[where, None], loss)
        where = np.flatnonzero(kinds == _MAP)
        if len(where):
            words, bits = _bits_of(rows[where])
            lost = np.zeros((len(where), self.num_words), np.uint64)
            lost[np.arange(len(where)), words] = bits
            self._lose_bits(where, lost, loss)
        return loss

    def remove_all(self, sets: Sets, rows: Rows) -> Removal:
        """Removes all of these rows from every set."""
        loss = Removal(sets.copy(), np.zeros(len(sets), np.int64), np.zeros(len(sets), np.bool_))
        is_lost = np.zeros(MAX_ROWS + 1, np.bool_)
        is_lost[rows] = True
        kinds = sets >> _KIND_SHIFT
        self._lose_singles((kinds == 0) & is_lost[sets & MAX_ROWS], loss)
        for kind, slab in self._lists.items():
            where = np.flatnonzero(kinds == kind)
            if len(where):
                slots = (sets[where] & _SLOT_MASK).astype(np.int64)
                self._lose_members(kind, where, is_lost[slab.items.take(slots, axis=0)], loss)
        where = np.flatnonzero(kinds == _MAP)
        if len(where):
            flags = np.packbits(is_lost[: 64 * self.num_words], bitorder="little")
            self._lose_bits(where, flags.view("<u8")[None, :], loss)
        return loss

    @staticmethod
    def _lose_singles(is_lost: Bits, loss: Removal) -> None:
        loss.num_removed[is_lost] = 1
        loss.is_empty[is_lost] = True

    def _lose_members(self, kind: int, where: Slots, is_lost: Bits, loss: Removal) -> None:
        loses = is_lost.any(axis=1)
        where, is_lost = where[loses], is_lost[loses]
        slots = (loss.sets[where] & _SLOT_MASK).astype(np.int64)
        slab = self._lists[kind]
        members = slab.items.take(slots, axis=0)
        members[is_lost] = _NOBODY
        slab.items[slots] = members
        loss.num_removed[where] = is_lost.sum(axis=1)
        counts = (members != _NOBODY).sum(axis=1)
        loss.is_empty[where] = counts == 0
        is_single = counts == 1
        # The greatest number stands for nobody, so the one that is left is the least.
        loss.sets[where[is_single]] = members[is_single].min(axis=1, initial=_NOBODY)
        shrinks = (counts > 1) & (counts <= _SHRINKS_AT.get(kind, 0))
        if shrinks.any():
            kept = np.sort(members[shrinks], axis=1)[:, : _LIST_SIZES[kind - 1]]
            loss.sets[where[shrinks]] = self._store(kind - 1, kept)
        slab.give(slots[(counts < 2) | shrinks])

    def _lose_bits(self, where: Slots, lost: NDArray[np.uint64], loss: Removal) -> None:
        slots = (loss.sets[where] & _SLOT_MASK).astype(np.int64)
        before = self._maps.items.take(slots, axis=0)
        after = before & ~lost
        self._maps.items[slots] = after
        counts = np.bitwise_count(after).sum(axis=1, dtype=np.int64)
        loss.num_removed[where] = np.bitwise_count(before).sum(axis=1, dtype=np.int64) - counts
        loss.is_empty[where] = counts == 0
        shrinks = (counts <= _SHRINKS_AT[_MAP]) & (counts > 0)
        index, rows = unpack_maps(after[shrinks])
        kept = np.full((int(shrinks.sum()), _LIST_SIZES[2]), _NOBODY, np.uint16)
        kept[index, np.arange(len(index)) - np.searchsorted(index, index)] = rows
        if len(kept):
            loss.sets[where[shrinks]] = self._store(2, kept)
        self._maps.give(slots[shrinks | (counts == 0)])

    def _store(self, kind: int, members: Rows) -> Sets:
        if kind != _MAP:
            slots = self._lists[kind].take(len(members))
            self._lists[kind].items[slots, : members.shape[1]] = members
        else:
            slots = self._maps.take(len(members))
            for column in members.T:
                words, bits = _bits_of(column)
                self._maps.items[slots, words] |= bits
        return _name(kind, slots)

    def count_leading_maps(self, sets: Sets) -> int:
        """Returns how many sets come before the first one that is a list."""
        is_list = sets < _FIRST_MAP
        first = int(is_list.argmax())
        return first if is_list[first] else len(sets)

    def rows_in(self, one: int) -> list[int]:
        """Returns the rows of one set."""
        kind, slot = one >> _KIND_SHIFT, one & _SLOT_MASK
        if kind == 0:
            return [one]
        if kind == _MAP:
            rows: list[int] = unpack_maps(self._maps.items[slot : slot + 1])[1].tolist()
            return rows
        return [row for row in self._lists[kind].items[slot].tolist() if row != _NOBODY]

    def maps_of(self, sets: Sets) -> NDArray[np.uint64]:
        """Returns sets that are maps, [number, words]."""
        maps: NDArray[np.uint64] = self._maps.items.take(sets & _SLOT_MASK, axis=0)
        return maps

    def lists_of(self, sets: Sets) -> Rows:
        """Returns the rows of each set in a line, padded with `MAX_ROWS`; maps have none."""
        kinds = sets >> _KIND_SHIFT
        kind = int(kinds.max())
        if kind == 0:
            return sets[:, None].astype(np.uint16)
        if kind != _MAP and (kinds == kind).all():
            return self._take_lists(kind, sets)
        lines = np.full((len(sets), max(_LIST_SIZES.values())), _NOBODY, np.uint16)
        lines[:, 0] = np.where(kinds == 0, sets, _NOBODY)
        for each, size in _LIST_SIZES.items():
            where = np.flatnonzero(kinds == each)
            if len(where):
                lines[where, :size] = self._take_lists(each, sets[where])
        return lines

    def _take_lists(self, kind: int, sets: Sets) -> Rows:
        lists: Rows = self._lists[kind].items.take(sets & _SLOT_MASK, axis=0)
        return lists

    def mark_maps(self, sets: Sets, rows: Rows) -> NDArray[np.uint16]:
        """Says which of up to 16 rows each set has, a bit for each row, if the set is a map."""
        marks = np.zeros(len(sets), np.uint16)
        where = np.flatnonzero(sets >> _KIND_SHIFT == _MAP)
        if len(where):
            maps = self.maps_of(sets[where])
            for number, row in enumerate(rows.tolist()):
                flags = maps[:, row >> 6] >> np.uint64(row & 63) & np.uint64(1)
                marks[where] |= flags.astype(np.uint16) << np.uint16(number)
        return marks


def count_bits(maps: NDArray[np.uint64]) -> int:
    """Returns how many bits are set."""
    return int(np.bitwise_count(maps).sum())


def unpack_maps(maps: NDArray[np.uint64], max_words: int | None = None) -> tuple[Slots, Slots]:
    """Returns, for each bit that is set, the index of its map and its row, in order.

    Of maps with more words that are not 0 than wanted, it returns nothing.
    """
    flat = maps.reshape(-1)
    where = np.flatnonzero(flat != 0)
    if max_words is not None and len(where) > max_words:
        return where[:0], where[:0]
    words = flat[where]
    below = words - np.uint64(1)
    if (words & below).any():
        octets = words.astype("<u8", copy=False).view(np.uint8)
        bits = np.flatnonzero(np.unpackbits(octets, bitorder="little").view(np.bool_))
        at = where[bits >> 6] * 64 + (bits & 63)
    else:
        # One bit in each.
        at = where * 64 + np.bitwise_count(below)
    # Not `divmod`, which takes thrice as long.
    index = at // (64 * maps.shape[1])
    return index, at - index * (64 * maps.shape[1])


def _bits_of(rows: NDArray[np.uint16] | Sets) -> tuple[Slots, NDArray[np.uint64]]:
    return (rows >> 6).astype(np.int64), np.uint64(1) << (rows & 63).astype(np.uint64)


def _name(kind: int, slots: Slots) -> Sets:
    return (slots | kind << _KIND_SHIFT).astype(np.uint32)


def _lengthen(array: NDArray[Any], length: int) -> None:
    """Makes an array longer where it is: the allocator moves large ones by their page tables.

    It gets a quarter longer, but in pieces, so that no call waits for much memory to be cleared.
    Nothing else refers to it between calls.
    """
    row_bytes = max(array.itemsize * math.prod(array.shape[1:]), 1)
    piece = min(len(array) // 4, _PIECE_BYTES // row_bytes)
    array.resize((max(length, len(array) + piece), *array.shape[1:]), refcheck=False)
