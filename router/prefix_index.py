"""Which worker holds which prefix, in granules of 128 tokens: a hint, never a promise.

    unwatched: the index learns from what was placed, and forgets the oldest of it
    watched:   the worker's own events count (see `cache_watch`); what was placed a moment ago
               counts beside them until the worker confirms it, or the hint is too old

Workers verify full digests and token ids themselves, so a wrong entry costs a cache miss and never
a wrong token. A worker that leaves is forgotten at once; its entries are swept out bit by bit.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.cache.granule_hash import GRANULE_TOKENS, hash_granules
from pdserve.request import WorkerId
from pdserve.timeline import Clock
from router.granule_table import GranuleTable, Keys
from router.holder_lengths import NO_LENGTHS, LengthMeter, Lengths
from router.holder_sets import MAX_ROWS, Bits, HolderSets, Rows
from router.placement_hints import PlacementHints

__all__ = ["GRANULE_TOKENS", "PrefixIndex", "hash_granules"]

HINT_S = 30.0
"""A placed prompt that its worker has not cached by then is not going to be."""
_NO_ROW = -1

Matches = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows of workers, and how many leading granules each has."""


@dataclass(slots=True)
class _Life:
    """What a worker has told since it was last cleared; nobody else has its place in sets."""

    worker_id: WorkerId
    place: int
    is_watched: bool = False


class PrefixIndex:
    """Maps granule keys to workers."""

    def __init__(
        self,
        max_keys: int = 1 << 18,
        clock: Clock | None = None,
        *,
        hint_s: float = HINT_S,
        seed: int = 0,
    ) -> None:
        """Knows nobody.

        Args:
            max_keys: most (granule, worker) pairs that are known from placements alone.
            clock: ages hints; without one they do not age.
            hint_s: how long a watched worker has to confirm what was placed there.
            seed: of the table's hash.
        """
        assert max_keys > 0
        self._clock = clock
        self._hint_s = hint_s
        self._table = GranuleTable(seed)
        self._sets = HolderSets()
        self._meter = LengthMeter(self._sets)
        self._num_pairs = 0
        self._rows: dict[WorkerId, int] = {}
        self._ids: dict[int, WorkerId] = {}
        self._lives: dict[WorkerId, _Life] = {}
        self._row_at = np.full(64, _NO_ROW, np.int64)
        """Of the worker whose place it is."""
        self._free_places: list[int] = []
        self._num_places = 0
        self._retired: list[int] = []
        """Places that are swept in this pass."""
        self._retired_next: list[int] = []
        self._hints = PlacementHints(max_keys)
        self._told: tuple[Sequence[int], Lengths] | None = None
        """The last prompt that was looked up, while what workers told of it is the same."""

    def __len__(self) -> int:
        """Counts (granule, worker) pairs; those of workers that left until they are swept out."""
        return self._num_pairs + len(self._hints)

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self._table.num_bytes + self._sets.num_bytes

    def join(self, worker_id: WorkerId, row: int | None = None) -> int:
        """Gives a worker a row, the caller's if it names one; it has that until it is forgotten."""
        known = self._rows.get(worker_id)
        if known is not None:
            assert row is None or row == known
            return known
        if row is None:
            row = next(free for free in range(len(self._ids) + 1) if free not in self._ids)
        assert row not in self._ids, f"row {row} is taken"
        self._rows[worker_id], self._ids[row] = row, worker_id
        self._begin_life(worker_id)
        return row

    def add(self, worker_id: WorkerId, keys: Sequence[int]) -> None:
        """Notes that a worker is about to hold these granules."""
        self.join(worker_id)
        life = self._lives[worker_id]
        ages = life.is_watched and self._clock is not None
        until_s = self._now_s() + self._hint_s if ages else float("inf")
        places, lengths = self._look_up(keys)
        (where,) = (places == life.place).nonzero()
        self._hints.add(life.place, keys[lengths.item(where[0]) if len(where) else 0 :], until_s)
        self._hints.drop(self._now_s())
        self.sweep()

    def match(self, keys: Sequence[int]) -> dict[WorkerId, int]:
        """Returns how many leading granules each worker holds; workers without any are absent."""
        rows, lengths = self.match_rows(keys)
        if not len(rows):
            return {}
        pairs = zip(rows.tolist(), lengths.tolist(), strict=True)
        return {self._ids[row]: length for row, length in pairs}

    def match_rows(self, keys: Sequence[int]) -> Matches:
        """Returns the rows of the workers that hold the first granule, and how many each holds."""
        self._hints.drop(self._now_s())
        places, lengths = self._hints.lengthen(keys, self._look_up(keys))
        rows = self._row_at[places]
        is_here = rows != _NO_ROW
        return rows[is_here], lengths[is_here]

    def _look_up(self, keys: Sequence[int]) -> Lengths:
        """Returns how much of a prompt is known at which places, by what they told."""
        if self._told is None or self._told[0] is not keys:
            self._told = keys, self._measure(keys)
        return self._told[1]

    def _measure(self, keys: Sequence[int]) -> Lengths:
        # Most prompts that are new to everybody are so from their first granule on.
        if not keys or not self._table.has(max(keys[0], 1)):
            return NO_LENGTHS
        # Takes no time if they lie in an array already, as those of prompts do.
        found = self._find_leading(_as_keys(np.frombuffer(array("Q", keys), np.uint64)))
        return self._meter.measure(found)

    def forget(self, worker_id: WorkerId) -> None:
        """Drops a worker, after its death or restart."""
        row = self._rows.pop(worker_id, None)
        if row is not None:
            del self._ids[row]
            self._retire(self._lives.pop(worker_id))

    def begin_snapshot(self, worker_id: WorkerId) -> None:
        """Voids all that is known of a worker; from now on its own events count."""
        self.join(worker_id)
        self._retire(self._lives[worker_id])
        self._begin_life(worker_id).is_watched = True

    def is_watched(self, worker_id: WorkerId) -> bool:
        """Says whether what a worker holds is known from itself."""
        life = self._lives.get(worker_id)
        return life is not None and life.is_watched

    def apply(
        self, worker_ids: Sequence[WorkerId], keys: Sequence[Keys], removed: Sequence[Bits]
    ) -> None:
        """Takes what watched workers tell of themselves, several at once.

        Args:
            worker_ids: the workers; what those tell that are not watched is void.
            keys: of the granules that came or went, in order, for each worker.
            removed: says for each key that it went.
        """
        self._hints.drop(self._now_s())
        lives = [self._lives.get(each) for each in worker_ids]
        known = [i for i, life in enumerate(lives) if life is not None and life.is_watched]
        if not sum(len(keys[i]) for i in known):
            return
        places = [np.full(len(keys[i]), self._place_of(worker_ids[i]), np.uint16) for i in known]
        self._take_events(
            np.concatenate(places),
            np.concatenate([keys[i] for i in known]),
            np.concatenate([removed[i] for i in known]),
        )
        self.sweep()

    def sweep(self) -> bool:
        """Takes out some entries of workers that left; False: there are none."""
        if self._hints.forget_some():
            return True
        if not self._retired:
            self._retired, self._retired_next = self._retired_next, []
        if not self._retired:
            return False
        slots, is_last = self._table.walk()
        self._sweep_slots(slots)
        if is_last:
            self._free_places += self._retired
            self._retired = []
        return True

    def _place_of(self, worker_id: WorkerId) -> int:
        return self._lives[worker_id].place

    def _begin_life(self, worker_id: WorkerId) -> _Life:
        while self._num_places >= MAX_ROWS and not self._free_places and self.sweep():
            pass
        if self._free_places:
            place = self._free_places.pop()
        else:
            place = self._num_places
            assert place < MAX_ROWS, "too many workers come and go"
            self._num_places += 1
            self._sets.admit(place)
            if place >= len(self._row_at):
                more = np.full(max(64 * self._sets.num_words, 2 * place), _NO_ROW, np.int64)
                more[: len(self._row_at)] = self._row_at
                self._row_at = more
        self._row_at[place] = self._rows[worker_id]
        self._told = None
        self._lives[worker_id] = _Life(worker_id, place)
        return self._lives[worker_id]

    def _retire(self, life: _Life) -> None:
        self._row_at[life.place] = _NO_ROW
        self._hints.forget(life.place)
        self._told = None
        self._retired_next.append(life.place)

    def _find_leading(self, keys: Keys) -> NDArray[np.uint32]:
        """Returns the sets of the leading keys that are there."""
        is_found, slots = self._table.find(keys)
        if not is_found.all():
            slots = slots[: int(is_found.argmin())]
        return self._table.values_at(slots)

    def _take_events(self, places: Rows, keys: Keys, is_removed: Bits) -> None:
        # Of several events for one pair the last one counts; `lexsort` keeps their order.
        order = np.lexsort((places, keys))
        places, keys, is_removed = places[order], keys[order], is_removed[order]
        is_same_key = keys[1:] == keys[:-1]
        is_last = np.append(~(is_same_key & (places[1:] == places[:-1])), True)
        places, keys, is_removed = places[is_last], keys[is_last], is_removed[is_last]
        self._told = None
        if len(self._hints):
            self._hints.end(places.tolist(), keys.tolist())
        is_stored = ~is_removed
        self._store(places[is_stored], keys[is_stored])
        self._remove(places[is_removed], keys[is_removed])

    def _store(self, places: Rows, keys: Keys) -> None:
        """Adds pairs, each once; keys are in order, as below."""
        keys = _as_keys(keys)
        for turn in _turns(keys):
            added, to = keys[turn], places[turn]
            is_found, slots = self._table.find(added)
            slots = slots[is_found]
            sets, is_new = self._sets.add(self._table.values_at(slots), to[is_found])
            self._table.set_values(slots, sets)
            self._table.insert(added[~is_found], to[~is_found].astype(np.uint32))
            self._num_pairs += int(is_new.sum()) + len(added) - len(slots)

    def _remove(self, places: Rows, keys: Keys) -> None:
        keys = _as_keys(keys)
        for turn in _turns(keys):
            is_found, slots = self._table.find(keys[turn])
            slots = slots[is_found]
            left = self._sets.remove(self._table.values_at(slots), places[turn][is_found])
            self._table.set_values(slots, left.sets)
            self._table.delete(slots[left.is_empty])
            self._num_pairs -= int(left.num_removed.sum())

    def _sweep_slots(self, slots: NDArray[np.int64]) -> None:
        sets = self._table.values_at(slots)
        left = self._sets.remove_all(sets, np.array(self._retired, np.uint16))
        self._table.set_values(slots, left.sets)
        self._table.delete(slots[left.is_empty])
        self._num_pairs -= int(left.num_removed.sum())

    def _now_s(self) -> float:
        return 0.0 if self._clock is None else self._clock.now()


def _as_keys(keys: Keys) -> Keys:
    """Returns keys without 0, which marks free slots of the table."""
    return np.maximum(keys, np.uint64(1))


def _turns(keys: Keys) -> list[Bits | slice]:
    """Says in which parts of ordered keys no key comes twice."""
    if not len(keys):
        return []
    is_first = np.append(True, keys[1:] != keys[:-1])
    if is_first.all():
        return [slice(None)]
    starts = is_first.nonzero()[0]
    rank = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
    return [rank == turn for turn in range(int(rank.max()) + 1)]
