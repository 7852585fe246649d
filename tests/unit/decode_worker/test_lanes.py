"""How the running sequences of a pipeline are split."""

import random

import pytest

from decode_worker.lanes import Lanes
from pdserve.cache.block_hash import HashChain
from pdserve.engine.scheduler import SequenceState, Stage
from tests.support.scheduling import make_request


def make_sequences(count: int, first: int = 0) -> list[SequenceState]:
    return [
        SequenceState(
            request=make_request(f"r{index}", 1),
            chain=HashChain((1,), 4, b"", ""),
            arrival=index,
            arrived_s=0.0,
            stage=Stage.RUNNING,
        )
        for index in range(first, first + count)
    ]


def sizes_of(running: list[SequenceState], num_lanes: int) -> list[int]:
    return [sum(one.lane == lane for one in running) for lane in range(num_lanes)]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1, 0, 0]), (3, [1, 1, 1]), (8, [3, 3, 2])])
def test_newcomers_are_split_evenly(count: int, sizes: list[int]):
    running = make_sequences(count)
    Lanes(3).settle(running)
    assert sizes_of(running, 3) == sizes


def test_a_newcomer_runs_in_the_lane_whose_turn_is_next():
    lanes = Lanes(2)
    lanes.note(0)
    running = make_sequences(1)
    lanes.settle(running)
    assert running[0].lane == 1


def test_lanes_take_turns():
    lanes = Lanes(3)
    assert lanes.turns == (0, 1, 2)
    lanes.note(1)
    assert lanes.turns == (0, 2, 1)


def test_whoever_has_a_lane_keeps_it_while_the_sizes_differ_by_one():
    lanes, running = Lanes(2), make_sequences(5)
    lanes.settle(running)
    before = [one.lane for one in running]
    lanes.settle(running)
    assert [one.lane for one in running] == before


def test_the_youngest_of_a_lane_that_is_two_too_large_changes_over():
    lanes, running = Lanes(2), make_sequences(6)
    lanes.settle(running)
    left = [one for one in running if one.lane == 0] + running[1:2]
    lanes.settle(left)
    assert sizes_of(left, 2) == [2, 2]
    assert left[2].lane == 1


def test_one_that_changes_over_is_in_no_lane_while_it_is_in_flight():
    lanes, running = Lanes(2), make_sequences(4)
    lanes.settle(running)
    left = [one for one in running if one.lane == 0]
    left[-1].num_flying = 1
    for _ in range(2):
        lanes.settle(left)
        assert [one.lane for one in left] == [0, None]
    left[-1].num_flying = 0
    lanes.settle(left)
    assert [one.lane for one in left] == [0, 1]


@pytest.mark.parametrize("num_lanes", [2, 3, 4])
def test_lanes_stay_even_whoever_comes_and_goes(num_lanes: int):
    rng = random.Random(num_lanes)
    lanes, running, num_made = Lanes(num_lanes), [], 0
    for _ in range(300):
        for one in running:
            one.num_flying = rng.randrange(2)
        running = [one for one in running if rng.random() < 0.8]
        arrived = make_sequences(rng.randrange(5), num_made)
        num_made += len(arrived)
        running += arrived
        lanes.settle(running)
        for one in running:
            one.num_flying = 0
        lanes.settle(running)
        sizes = sizes_of(running, num_lanes)
        assert sum(sizes) == len(running)
        assert max(sizes) - min(sizes) <= 1
