"""What workers are about to hold: granules of prompts that were placed there a moment ago.

Few are in this state at a time, and a placement brings a few: plain dictionaries are quicker for
that than arrays. A hint ends when its worker tells of the granule, when it is too old, or when
there are too many of them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from router.holder_lengths import Lengths

_MIN_TIDY = 1 << 12
_KEYS_A_TURN = 1 << 13
"""Of forgotten places, that end at once."""
_NEVER_S = float("inf")


@dataclass(slots=True)
class _Hint:
    """Granules of one placement; the last ones go first."""

    place: int
    keys: list[int]
    until_s: float


class PlacementHints:
    """Pairs of granule and place that are known from placements alone."""

    def __init__(self, max_pairs: int) -> None:
        """Keeps so many pairs at most."""
        self._max_pairs = max_pairs
        self._at: dict[int, dict[int, _Hint]] = {}
        """By key and place: the last hint that says so."""
        self._aging: deque[_Hint] = deque()
        """The oldest first."""
        self._lasting: deque[_Hint] = deque()
        """Those that do not age."""
        self._forgotten: list[_Hint] = []
        """Those of places that are gone."""
        self._num_pairs = 0
        self._num_queued = 0
        """Keys in both when they were last tidied, and what came since."""

    def __len__(self) -> int:
        """Counts pairs."""
        return self._num_pairs

    @property
    def num_queued(self) -> int:
        """Keys of all hints, those that do not count any more included."""
        return sum(len(hint.keys) for queue in self._queues for hint in queue)

    def add(self, place: int, keys: Sequence[int], until_s: float) -> None:
        """Notes that a place is about to hold granules; an infinite time: until it tells more."""
        hint = _Hint(place, list(keys), until_s)
        at, num_new = self._at, 0
        for key in keys:
            places = at.get(key)
            if places is None:
                at[key] = {place: hint}
                num_new += 1
            else:
                num_new += place not in places
                places[place] = hint
        self._num_pairs += num_new
        self._num_queued += len(hint.keys)
        (self._lasting if until_s == _NEVER_S else self._aging).append(hint)
        self._tidy()

    def lengthen(self, keys: Sequence[int], told: Lengths) -> Lengths:
        """Returns how much of a prompt places have together with what they told themselves."""
        at = self._at
        # Hints begin where what was told ends.
        ends = {0, *told[1].tolist()} - {len(keys)} if at else ()
        if at.keys().isdisjoint([keys[number] for number in ends]):
            return told
        hinted = [number for number, key in enumerate(keys) if key in at]
        lengths: dict[int, int] = dict(zip(told[0].tolist(), told[1].tolist(), strict=True))
        for number in hinted:
            for place in at[keys[number]]:
                if lengths.get(place, 0) == number:
                    lengths[place] = number + 1
        return (
            np.fromiter(lengths.keys(), np.int64, len(lengths)),
            np.fromiter(lengths.values(), np.int64, len(lengths)),
        )

    def end(self, places: Iterable[int], keys: Iterable[int]) -> None:
        """Ends hints of which the places themselves have told now."""
        at = self._at
        if not at:
            return
        for place, key in zip(places, keys, strict=True):
            there = at.get(key)
            if there is not None and there.pop(place, None) is not None:
                self._num_pairs -= 1
                if not there:
                    del at[key]

    def forget(self, place: int) -> None:
        """Ends all hints at a place, bit by bit with each `forget_some` that follows."""
        for queue in self._queues:
            left = [hint for hint in queue if hint.place != place]
            if len(left) < len(queue):
                self._forgotten += [hint for hint in queue if hint.place == place]
                queue.clear()
                queue.extend(left)

    def forget_some(self) -> bool:
        """Ends some hints at places that were forgotten; False: there are none."""
        had_any = bool(self._forgotten)
        room = _KEYS_A_TURN
        while self._forgotten and room > 0:
            hint = self._forgotten.pop()
            ended, hint.keys = hint.keys[:room], hint.keys[room:]
            room -= len(ended)
            self.end([hint.place] * len(ended), ended)
            if hint.keys:
                self._forgotten.append(hint)
        return had_any

    def drop(self, now_s: float) -> None:
        """Ends hints that are too old, or too many, the oldest first and their ends before all."""
        for queue in self._queues:
            while queue and (queue[0].until_s <= now_s or self._num_pairs > self._max_pairs):
                hint = queue[0]
                if not hint.keys:
                    queue.popleft()
                    continue
                key = hint.keys.pop()
                if self._counts(hint, key):
                    self.end((hint.place,), (key,))

    @property
    def _queues(self) -> tuple[deque[_Hint], deque[_Hint]]:
        return self._lasting, self._aging

    def _counts(self, hint: _Hint, key: int) -> bool:
        """Says whether it is this hint alone from which the pair is known."""
        return self._at.get(key, {}).get(hint.place) is hint

    def _tidy(self) -> None:
        """Lets go of what was confirmed, or hinted at again, once that is most of it."""
        if self._num_queued < 2 * self._num_pairs + _MIN_TIDY:
            return
        for queue in self._queues:
            for hint in queue:
                hint.keys = [key for key in hint.keys if self._counts(hint, key)]
            left = [hint for hint in queue if hint.keys]
            queue.clear()
            queue.extend(left)
        self._num_queued = self._num_pairs
