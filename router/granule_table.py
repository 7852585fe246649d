"""A hash table of 64-bit keys in flat arrays that grows a segment at a time.

A key may stand in one of two buckets of eight, both of its segment. It goes to the emptier one; if
both are full, some key there moves to its other bucket (cuckoo hashing: Pagh and Rodler 2001;
buckets: Dietzfelbinger and Weidling 2007). So a look-up reads two cache lines, and nothing is left
behind where a key was. All calls work on arrays.

Each segment is spread anew when it gets full. The buckets of all segments lie interleaved, the
first of each, then the second of each: so the arrays get longer at their end, where they are, and
ahead of need, a piece a call. What a call takes is thus bounded by one segment or a multiple of its
own keys.
"""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]
Slots = NDArray[np.int64]

_BUCKET = 8
_MAX_FILL = 0.85
_HARD_FILL = 0.94
"""Cuckoo hashing in buckets of eight goes to 0.98."""
_SPREADS_AT = 0.8
"""So full a segment is due to be spread over more buckets."""
_SPREAD_PER_KEY = 8
"""Keys that are spread anew for each one that comes, unless a segment is past the hard limit. It is
enough to get round before any is: the table grows by a sixth from one limit to the other."""
_GROWTH = 1.15
_EXTENDS_AT = 0.76
"""So full a segment asks for longer arrays: some time before it needs them."""
_EXTENSION_BYTES = 1 << 22
"""That the arrays get longer by in one call, if that is soon enough."""
_SEGMENT_BITS = 9
_NUM_SEGMENTS = 1 << _SEGMENT_BITS
_SEGMENT_SHIFT = np.uint64(64 - _SEGMENT_BITS)
_MAX_KICKS = 200
_NUM_PARTS = 4
_MAX_REHASH = 1 << 16
"""Keys that are spread anew at once."""
_MASK = 2**64 - 1
_HALF = np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SECOND_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class GranuleTable:
    """Maps keys to 32-bit values; 0 is no key."""

    def __init__(self, seed: int = 0) -> None:
        """Is empty.

        Args:
            seed: of the hash. Keys come from what clients send: who does not know the seed cannot
                choose prompts that fill one segment.
        """
        self._factor = np.uint64((0xD6E8FEB86659FD93 ^ seed << 1) & _MASK | 1)
        self._stride = 1
        self._num_buckets = np.ones(_NUM_SEGMENTS, np.uint64)
        self._counts = np.zeros(_NUM_SEGMENTS, np.int64)
        self._keys = np.zeros((_NUM_SEGMENTS, _BUCKET), np.uint64)
        self._values = np.zeros((_NUM_SEGMENTS, _BUCKET), np.uint32)

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return int(self._keys.nbytes + self._values.nbytes)

    @property
    def num_segments(self) -> int:
        """What `segment` takes."""
        return _NUM_SEGMENTS

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Slots]:
        """Returns which keys are there, and the slots of those; other slots mean nothing."""
        mixed = keys * self._factor
        segments = (mixed >> _SEGMENT_SHIFT).astype(np.int64)
        is_found, slots = self._find_in(self._first_of(mixed, segments), keys)
        rest = np.flatnonzero(~is_found)
        if len(rest):
            others = self._second_of(mixed[rest], segments[rest])
            is_found[rest], slots[rest] = self._find_in(others, keys[rest])
        return is_found, slots

    def has(self, key: int) -> bool:
        """Says whether one key is there, as `find` does, in the time of a few of its steps."""
        mixed = key * int(self._factor) & _MASK
        segment = mixed >> int(_SEGMENT_SHIFT)
        num_buckets = self._num_buckets.item(segment)
        other = (mixed ^ mixed >> 32) * int(_SECOND_FACTOR) & _MASK
        for fraction in (mixed >> 16 & int(_LOW_32), other >> 32):
            bucket = (fraction * num_buckets >> 32) * _NUM_SEGMENTS + segment
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
        self._keys.reshape(-1)[slots] = 0
        segments = slots // _BUCKET % _NUM_SEGMENTS
        self._counts -= np.bincount(segments, minlength=_NUM_SEGMENTS)

    def insert(self, keys: Keys, values: Values) -> None:
        """Adds keys that are not there, each once."""
        added = np.bincount(self._segments_of(keys), minlength=_NUM_SEGMENTS)
        self._counts += added
        fill = self._counts / (self._num_buckets * _BUCKET)
        self._extend_ahead(self._num_buckets[fill > _EXTENDS_AT])
        crowded = np.flatnonzero(fill > _SPREADS_AT)
        if len(crowded):
            # All segments get full at about the same time: the fullest ones come first.
            crowded = crowded[np.argsort(-fill[crowded])]
            is_due = np.cumsum(self._counts[crowded]) <= _SPREAD_PER_KEY * len(keys)
            is_due |= fill[crowded] > _HARD_FILL
            is_due[0] = True
            self._grow(crowded[is_due])
        self._place(keys, values)

    def segment(self, index: int) -> Slots:
        """Returns the slots of all keys in a segment."""
        buckets, places = np.nonzero(self._keys.reshape(-1, _NUM_SEGMENTS, _BUCKET)[:, index])
        return (buckets * _NUM_SEGMENTS + index) * _BUCKET + places

    def _segments_of(self, keys: Keys) -> Slots:
        segments: Slots = ((keys * self._factor) >> _SEGMENT_SHIFT).astype(np.int64)
        return segments

    def _buckets_of(self, keys: Keys) -> tuple[Slots, Slots]:
        mixed = keys * self._factor
        segments = (mixed >> _SEGMENT_SHIFT).astype(np.int64)
        return self._first_of(mixed, segments), self._second_of(mixed, segments)

    def _first_of(self, mixed: Keys, segments: Slots) -> Slots:
        return self._bucket(mixed >> np.uint64(16) & _LOW_32, segments)

    def _second_of(self, mixed: Keys, segments: Slots) -> Slots:
        return self._bucket((mixed ^ mixed >> _HALF) * _SECOND_FACTOR >> _HALF, segments)

    def _bucket(self, fractions: Keys, segments: Slots) -> Slots:
        """Returns the buckets at so many 2**32-ths of their segments."""
        buckets = (fractions * self._num_buckets.take(segments) >> _HALF).astype(np.int64)
        buckets *= _NUM_SEGMENTS
        buckets += segments
        return buckets

    def _find_in(self, buckets: Slots, keys: Keys) -> tuple[NDArray[np.bool_], Slots]:
        is_same = _as_words(self._keys.take(buckets, axis=0) == keys[:, None])
        return is_same != 0, buckets * _BUCKET + _lowest(is_same)

    def _place(self, keys: Keys, values: Values) -> None:
        """Writes keys that their segments have room for."""
        keys, values = self._place_free(keys, values)
        for turn in range(_MAX_KICKS):
            if not len(keys):
                return
            first, second = self._buckets_of(keys)
            buckets = first if turn % 2 else second
            slots = buckets * _BUCKET + (turn * 5 + np.arange(len(keys))) % _BUCKET
            taken, winners = np.unique(slots, return_index=True)
            flat_keys, flat_values = self._keys.reshape(-1), self._values.reshape(-1)
            evicted = flat_keys[taken], flat_values[taken]
            flat_keys[taken], flat_values[taken] = keys[winners], values[winners]
            keys = np.concatenate((np.delete(keys, winners), evicted[0]))
            values = np.concatenate((np.delete(values, winners), evicted[1]))
            # A bucket that was not full after all evicted nobody.
            keys, values = self._place_free(keys[keys != 0], values[keys != 0])
        if len(keys):
            self._grow(np.unique(self._segments_of(keys)), must_grow=True)
            self._place(keys, values)

    def _place_free(self, keys: Keys, values: Values) -> tuple[Keys, Values]:
        """Writes keys where there is room, and returns those whose buckets are full."""
        flat_keys, flat_values = self._keys.reshape(-1), self._values.reshape(-1)
        first, second = self._buckets_of(keys)
        pending = np.arange(len(keys))
        stuck: list[Slots] = []
        while len(pending):
            one, two = first[pending], second[pending]
            free_one, free_two = (
                _as_words(self._keys.take(each, axis=0) == 0) for each in (one, two)
            )
            prefers_two = np.bitwise_count(free_two) > np.bitwise_count(free_one)
            free = np.where(prefers_two, free_two, free_one)
            has_room = free != 0
            if not has_room.all():
                stuck.append(pending[~has_room])
                pending, one, two = pending[has_room], one[has_room], two[has_room]
                prefers_two, free = prefers_two[has_room], free[has_room]
            slots = np.where(prefers_two, two, one) * _BUCKET
            slots += _choose(free, keys[pending])
            # Several may write one slot: the key that stands there afterwards has won it.
            flat_keys[slots] = keys[pending]
            has_won = flat_keys[slots] == keys[pending]
            flat_values[slots[has_won]] = values[pending[has_won]]
            pending = pending[~has_won]
        left = np.concatenate(stuck) if stuck else pending
        return keys[left], values[left]

    def _grow(self, segments: Slots, *, must_grow: bool = False) -> None:
        """Gives segments the buckets that there are for each, and more if they need more."""
        needed = int(np.ceil(self._counts[segments].max() / (_BUCKET * _MAX_FILL)))
        if must_grow:
            needed = max(needed, int(self._num_buckets[segments].max()) + 1)
        needed = max(needed, int(np.ceil(int(self._num_buckets[segments].min()) * _GROWTH)))
        if needed > self._stride:
            self._extend(needed)
        at_once = max(1, _MAX_REHASH // (self._stride * _BUCKET))
        for start in range(0, len(segments), at_once):
            some = segments[start : start + at_once]
            # Made anew for each turn: who places keys may extend the arrays.
            keys = self._keys.reshape(-1, _NUM_SEGMENTS, _BUCKET)
            values = self._values.reshape(-1, _NUM_SEGMENTS, _BUCKET)
            num_buckets = int(self._num_buckets[some].max())
            old_keys, old_values = keys[:num_buckets, some], values[:num_buckets, some]
            keys[:num_buckets, some] = 0
            self._num_buckets[some] = self._stride
            is_used = old_keys != 0
            spread_keys, spread_values = old_keys[is_used], old_values[is_used]
            # In parts, so that the later ones see how full the buckets have become.
            for part in range(_NUM_PARTS):
                self._place(spread_keys[part::_NUM_PARTS], spread_values[part::_NUM_PARTS])

    def _extend_ahead(self, num_buckets: Keys) -> None:
        """Makes the arrays a piece longer if segments, which have so many buckets, need it soon."""
        if not len(num_buckets):
            return
        wanted = int(np.ceil(int(num_buckets.max()) * _GROWTH))
        if self._stride < wanted:
            piece = _EXTENSION_BYTES // (_NUM_SEGMENTS * _BUCKET * (8 + 4))
            self._extend(min(wanted, self._stride + max(piece, 1)))

    def _extend(self, stride: int) -> None:
        # In place: the allocator moves large arrays by their page tables, not by their bytes.
        # Nothing else refers to them between calls.
        self._keys.resize((stride * _NUM_SEGMENTS, _BUCKET), refcheck=False)
        self._values.resize((stride * _NUM_SEGMENTS, _BUCKET), refcheck=False)
        self._stride = stride


_ONE = np.uint64(1)


def _as_words(flags: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Packs the eight flags of each row into the bytes of a word."""
    return flags.view("<u8")[:, 0]


def _choose(free: NDArray[np.uint64], keys: Keys) -> Slots:
    """Returns a free place in each bucket: one by the key, so that few keys want the same."""
    turned = (keys & np.uint64(7)) << np.uint64(3)
    # The first one that is free from there on, going round.
    later = free >> turned
    first = np.where(later != 0, later, free)
    start = np.where(later != 0, turned >> np.uint64(3), np.uint64(0)).astype(np.int64)
    return start + _lowest(first & (~first + _ONE))


def _lowest(words: NDArray[np.uint64]) -> Slots:
    """Returns which flag is set in words with exactly one."""
    places: Slots = (np.bitwise_count(words - _ONE) >> 3).astype(np.int64)
    return places
