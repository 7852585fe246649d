"""A hash table of 64-bit keys in flat arrays that grows bit by bit and is always as full.

A key may stand in one of two buckets of eight. It goes to the emptier one; if both are full, some
key there moves to its other bucket (cuckoo hashing: Pagh and Rodler 2001; buckets: Dietzfelbinger
and Weidling 2007). So a look-up reads two cache lines at most, and nothing is left behind where a
key was. All calls work on arrays.

    | split | to be split | those split off |      a key's bucket: the low bits of its hash, with
    0       n - half      half              n      one bit less where that would be n or more

For keys that come, buckets are added at the end (linear hashing: Litwin 1980), each split off the
next one in turn: keys whose hash has the next bit go there, to the same places. Nothing is placed
anew, and what a call takes is bounded by a multiple of its own keys, however large the table is.
Twice as many keys hash to a bucket that is still to be split as to one that has been, but since
each has two to choose from, all get about as full, and memory is the same at every size.
"""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]
Slots = NDArray[np.int64]

_BUCKET = 8
_FIRST_BUCKETS = 1 << 7
_FILL = 0.7
"""It goes to 0.9, but what comes then pushes four others on instead of one in ten."""
_SPARE_SHARE = 64
_MAX_SPARE_BUCKETS = 1 << 15
"""The arrays get longer by one bucket for so many that are there and by so many at most: no call
waits for much memory to be cleared."""
_MAX_KICKS = 200
_WALK_BUCKETS = 1 << 12
"""That one step of a walk takes: more than come with one insertion of 8,192 keys."""
_MASK = 2**64 - 1
_HALF = np.uint64(32)
_SECOND_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NO_KEY = np.uint64(0)
_NO_KEYS = np.zeros(0, np.uint64)
_ONE = np.uint64(1)


class GranuleTable:
    """Maps keys to 32-bit values; 0 is no key."""

    def __init__(self, seed: int = 0) -> None:
        """Is empty.

        Args:
            seed: of the hash. Keys come from what clients send: who does not know the seed cannot
                choose prompts that crowd a few buckets.
        """
        self._factor = np.uint64((0xD6E8FEB86659FD93 ^ seed << 1) & _MASK | 1)
        self._num_keys = 0
        self._num_buckets = _FIRST_BUCKETS
        self._half = _FIRST_BUCKETS
        """A power of two: the buckets when all had last been split."""
        self._keys = np.zeros((_FIRST_BUCKETS, _BUCKET), np.uint64)
        self._values = np.zeros((_FIRST_BUCKETS, _BUCKET), np.uint32)
        self._num_walked = 0
        """Buckets; 0: no walk is going on."""
        self._moved: list[Keys] = []
        """Keys that were moved out of buckets to which the walk has not come yet."""

    def __len__(self) -> int:
        return self._num_keys

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return int(self._keys.nbytes + self._values.nbytes)

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Slots]:
        """Returns which keys are there, and the slots of those; other slots mean nothing."""
        mixed = keys * self._factor
        is_found, slots = self._find_in(self._first_of(mixed), keys)
        rest = np.flatnonzero(~is_found)
        if len(rest):
            is_found[rest], slots[rest] = self._find_in(self._second_of(mixed[rest]), keys[rest])
        return is_found, slots

    def has(self, key: int) -> bool:
        """Says whether one key is there, as `find` does, in the time of a few of its steps."""
        mixed = key * int(self._factor) & _MASK
        for hashed in (mixed, (mixed ^ mixed >> 32) * int(_SECOND_FACTOR) & _MASK):
            bucket = hashed >> 32 & 2 * self._half - 1
            if bucket >= self._num_buckets:
                bucket -= self._half
            if key in self._keys[bucket].tolist():
                return True
        return False

    def values_at(self, slots: Slots) -> Values:
        """Returns the values of keys that were found."""
        return self._values.take(slots)

    def set_values(self, slots: Slots, values: Values) -> None:
        """Changes the values of keys that were found."""
        self._values.reshape(-1)[slots] = values

    def delete(self, slots: Slots) -> None:
        """Removes keys that were found."""
        self._keys.reshape(-1)[slots] = _NO_KEY
        self._num_keys -= len(slots)

    def insert(self, keys: Keys, values: Values) -> None:
        """Adds keys that are not there, each once."""
        self._num_keys += len(keys)
        self._grow(int(np.ceil(self._num_keys / (_BUCKET * _FILL))))
        self._place(keys, values)

    def walk(self) -> tuple[Slots, bool]:
        """Returns the slots of some keys, of others with each call, and whether these are the last.

        Between calls the table may change. What is there all the time comes once at least.
        """
        start, end = self._num_walked, min(self._num_walked + _WALK_BUCKETS, self._num_buckets)
        is_found, behind = self.find(np.concatenate((*self._moved, _NO_KEYS)))
        behind = np.unique(behind[is_found])
        ahead = np.flatnonzero(self._keys[start:end]) + start * _BUCKET
        # What is split off later comes from buckets that have been walked.
        is_last = end == self._num_buckets
        self._num_walked, self._moved = 0 if is_last else end, []
        return np.concatenate((behind[behind < start * _BUCKET], ahead)), is_last

    def _first_of(self, mixed: Keys) -> Slots:
        return self._bucket_of(mixed)

    def _second_of(self, mixed: Keys) -> Slots:
        return self._bucket_of((mixed ^ mixed >> _HALF) * _SECOND_FACTOR)

    def _bucket_of(self, hashes: Keys) -> Slots:
        buckets = (hashes >> _HALF & np.uint64(2 * self._half - 1)).view(np.int64)
        buckets -= self._half * (buckets >= self._num_buckets)
        return buckets

    def _find_in(self, buckets: Slots, keys: Keys) -> tuple[NDArray[np.bool_], Slots]:
        is_same = self._flags(buckets, keys[:, None])
        return is_same != 0, buckets * _BUCKET + _lowest(is_same)

    def _flags(self, buckets: Slots, keys: Keys | np.uint64) -> NDArray[np.uint64]:
        """Says which places of the buckets have a key, one byte for each place."""
        is_same: NDArray[np.bool_] = self._keys.take(buckets, axis=0) == keys
        return is_same.view("<u8")[:, 0]

    def _place(self, keys: Keys, values: Values) -> None:
        keys, values = self._place_free(keys, values)
        for turn in range(_MAX_KICKS):
            if not len(keys):
                return
            mixed = keys * self._factor
            buckets = self._first_of(mixed) if turn % 2 else self._second_of(mixed)
            slots = buckets * _BUCKET + (turn * 5 + np.arange(len(keys))) % _BUCKET
            taken, winners = np.unique(slots, return_index=True)
            flat_keys, flat_values = self._keys.reshape(-1), self._values.reshape(-1)
            evicted = flat_keys[taken], flat_values[taken]
            if self._num_walked:
                is_ahead = (taken >= self._num_walked * _BUCKET) & (evicted[0] != _NO_KEY)
                self._moved.append(evicted[0][is_ahead])
            flat_keys[taken], flat_values[taken] = keys[winners], values[winners]
            keys = np.concatenate((np.delete(keys, winners), evicted[0]))
            values = np.concatenate((np.delete(values, winners), evicted[1]))
            # A bucket that was not full after all evicted nobody.
            keys, values = self._place_free(keys[keys != 0], values[keys != 0])
        if len(keys):
            self._grow(self._num_buckets + max(len(keys), self._num_buckets // _SPARE_SHARE))
            self._place(keys, values)

    def _place_free(self, keys: Keys, values: Values) -> tuple[Keys, Values]:
        """Writes keys where there is room, and returns those that found none."""
        mixed = keys * self._factor
        first, second = self._first_of(mixed), self._second_of(mixed)
        first_room = np.bitwise_count(self._flags(first, _NO_KEY))
        second_room = np.bitwise_count(self._flags(second, _NO_KEY))
        is_left = ~self._place_in(np.where(second_room > first_room, second, first), keys, values)
        return keys[is_left], values[is_left]

    def _place_in(self, buckets: Slots, keys: Keys, values: Values) -> NDArray[np.bool_]:
        """Writes keys to buckets that have room; says which."""
        flat_keys, flat_values = self._keys.reshape(-1), self._values.reshape(-1)
        is_placed = np.zeros(len(keys), np.bool_)
        pending = np.arange(len(keys))
        while len(pending):
            free = self._flags(buckets[pending], _NO_KEY)
            pending, free = pending[free != 0], free[free != 0]
            slots = buckets[pending] * _BUCKET + _choose(free, keys[pending])
            # Several may write one slot: the key that stands there afterwards has won it.
            flat_keys[slots] = keys[pending]
            has_won = flat_keys[slots] == keys[pending]
            flat_values[slots[has_won]] = values[pending[has_won]]
            is_placed[pending[has_won]] = True
            pending = pending[~has_won]
        return is_placed

    def _grow(self, num_buckets: int) -> None:
        while self._num_buckets < num_buckets:
            start = self._num_buckets - self._half
            end = min(start + num_buckets - self._num_buckets, self._half)
            self._split(start, end)
            if end == self._half:
                self._half *= 2

    def _split(self, start: int, end: int) -> None:
        """Splits these buckets, which are the next ones in turn."""
        self._num_buckets = self._half + end
        self._extend()
        keys, values = self._keys[start:end], self._values[start:end]
        mixed = keys * self._factor
        here = np.arange(start, end)[:, None]
        # A key stands here by its first or its second hash; it may stay by either.
        moves = (self._first_of(mixed) != here) & (self._second_of(mixed) != here)
        self._keys[self._half + start : self._num_buckets] = keys * moves
        self._values[self._half + start : self._num_buckets] = values
        keys *= ~moves

    def _extend(self) -> None:
        length = len(self._keys)
        if self._num_buckets > length:
            more = min(length // _SPARE_SHARE, _MAX_SPARE_BUCKETS)
            length = max(self._num_buckets, length + more)
            # In place: the allocator moves large arrays by their page tables, not by their bytes.
            # Nothing else refers to them between calls.
            self._keys.resize((length, _BUCKET), refcheck=False)
            self._values.resize((length, _BUCKET), refcheck=False)


def _choose(free: NDArray[np.uint64], keys: Keys) -> Slots:
    """Returns a free place in each bucket: one by the key, so that few keys want the same."""
    turned = (keys & np.uint64(7)) << np.uint64(3)
    # The first one that is free from there on, going round.
    later = free >> turned
    first = np.where(later != 0, later, free)
    start = np.where(later != 0, turned >> np.uint64(3), np.uint64(0)).astype(np.int64)
    return start + _lowest(first & (~first + _ONE))


def _lowest(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Returns which flag is set in words with exactly one."""
    places: NDArray[np.uint8] = np.bitwise_count(words - _ONE) >> 3
    return places
