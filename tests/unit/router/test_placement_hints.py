"""Hints of placements: what they add to what workers told, and when they end."""

from itertools import pairwise

import numpy as np
import pytest

from router import placement_hints
from router.holder_lengths import Lengths
from router.placement_hints import PlacementHints

NOTHING: Lengths = (np.zeros(0, np.int64), np.zeros(0, np.int64))
FOREVER = float("inf")


def _lengths(hints: PlacementHints, keys: list[int], told: Lengths = NOTHING) -> dict[int, int]:
    places, lengths = hints.lengthen(keys, told)
    return dict(zip(places.tolist(), lengths.tolist(), strict=True))


def test_a_hint_goes_on_from_where_what_was_told_ends():
    hints = PlacementHints(100)
    hints.add(4, [3, 4], 10.0)
    told = np.array([4, 5]), np.array([2, 2])
    assert _lengths(hints, [1, 2, 3, 4, 5], told) == {4: 4, 5: 2}
    assert _lengths(hints, [1, 9, 3, 4], (np.array([4]), np.array([1]))) == {4: 1}


def test_a_prompt_without_any_hint_is_answered_by_what_was_told_itself():
    hints = PlacementHints(100)
    hints.add(4, [3, 4], 10.0)
    told = np.array([4]), np.array([2])
    assert hints.lengthen([7, 8], told) is told


def test_a_pair_is_counted_once_however_often_it_is_hinted_at():
    hints = PlacementHints(100)
    hints.add(1, [7, 8, 7], 10.0)
    hints.add(1, [7, 8], 20.0)
    hints.add(2, [7], 20.0)
    assert len(hints) == 3
    hints.end([1, 1, 3], [7, 7, 8])
    assert len(hints) == 2
    assert _lengths(hints, [7, 8]) == {2: 1}


def test_the_oldest_hints_go_first_and_their_ends_before_their_beginnings():
    hints = PlacementHints(5)
    hints.add(1, [1, 2, 3], 10.0)
    hints.add(2, [4, 5, 6, 7], 20.0)
    hints.drop(0.0)
    assert (len(hints), _lengths(hints, [1, 2, 3])) == (5, {1: 1})
    hints.drop(10.0)
    assert (len(hints), _lengths(hints, [1])) == (4, {})
    hints.drop(20.0)
    assert (len(hints), hints.num_queued) == (0, 0)


def test_a_place_that_is_forgotten_has_no_hint_left_and_others_keep_theirs():
    hints = PlacementHints(100)
    hints.add(1, [1, 2], 10.0)
    hints.add(1, [1, 3], FOREVER)
    hints.add(2, [1], 10.0)
    hints.forget(1)
    while hints.forget_some():
        pass
    assert (len(hints), _lengths(hints, [1, 2])) == (1, {2: 1})
    hints.add(1, [1], FOREVER)
    assert _lengths(hints, [1]) == {1: 1, 2: 1}


def test_hints_without_an_age_stay():
    hints = PlacementHints(100)
    hints.add(1, [1], FOREVER)
    hints.drop(1e9)
    assert _lengths(hints, [1]) == {1: 1}


def test_no_turn_of_forgetting_a_place_ends_more_than_so_many_hints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_hints, "_KEYS_A_TURN", 50)
    hints = PlacementHints(10_000)
    for number in range(20):
        hints.add(1, range(100 * number, 100 * number + 70), FOREVER)
        hints.add(2, range(100 * number, 100 * number + 10), 10.0)
    hints.forget(1)
    counts = [len(hints)]
    while hints.forget_some():
        counts.append(len(hints))
    assert (counts[0], counts[-1]) == (20 * 80, 20 * 10)
    assert max(before - after for before, after in pairwise(counts)) <= 50


def test_a_prompt_that_no_hint_goes_on_with_is_answered_by_what_was_told_itself():
    hints = PlacementHints(100)
    hints.add(4, [8], 10.0)
    told = np.array([4, 5]), np.array([1, 3])
    assert hints.lengthen([7, 6, 8, 9], told) is told
    assert _lengths(hints, [7, 8, 6, 9], told) == {4: 2, 5: 3}
