"""Hints of placements: what they add to what workers told, and when they end."""

import numpy as np

from router.placement_hints import Lengths, PlacementHints

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
    assert (len(hints), _lengths(hints, [1, 2])) == (1, {2: 1})
    hints.add(1, [1], FOREVER)
    assert _lengths(hints, [1]) == {1: 1, 2: 1}


def test_hints_without_an_age_stay():
    hints = PlacementHints(100)
    hints.add(1, [1], FOREVER)
    hints.drop(1e9)
    assert _lengths(hints, [1]) == {1: 1}
