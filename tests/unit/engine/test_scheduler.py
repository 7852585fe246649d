import pytest

from pdserve.cache.block_hash import HashChain
from pdserve.engine.scheduler import (
    SequenceRoster,
    SequenceState,
    Stage,
    WaitingLanes,
    chunk_budget,
    num_blocks_for,
    num_chunk_tokens,
)
from pdserve.errors import Overloaded, StaleAttempt
from pdserve.request import Request, RequestId
from tests.support.scheduling import make_request


def add(roster: SequenceRoster, request: Request, now_s: float = 0.0) -> SequenceState:
    chain = HashChain(request.token_ids, 4, b"", "r")
    return roster.add(request, chain, Stage.WAITING, now_s)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_a_started_block_counts_whole(num_tokens: int, num_blocks: int):
    assert num_blocks_for(num_tokens, 16) == num_blocks


@pytest.mark.parametrize(
    ("start", "end", "budget", "num_tokens"),
    [
        (0, 100, 256, 100),  # all that is left
        (0, 100, 100, 100),
        (0, 1000, 256, 256),
        (0, 1000, 200, 192),  # down to a tile's end
        (16, 1000, 100, 48),  # from a cached prefix to a tile's end
        (0, 1000, 63, 63),  # not one tile: split it
        (32, 1000, 20, 20),
        (0, 1, 1, 1),
    ],
)
def test_chunks_end_on_tiles_where_they_can(start: int, end: int, budget: int, num_tokens: int):
    assert num_chunk_tokens(start, end, budget, may_split_tile=True) == num_tokens


def test_a_tile_is_not_split_for_a_rest_of_the_budget():
    assert num_chunk_tokens(0, 1000, 63, may_split_tile=False) == 0
    assert num_chunk_tokens(0, 63, 63, may_split_tile=False) == 63


def test_returned_requests_go_first_and_each_lane_keeps_its_order():
    lanes, roster = WaitingLanes(8), SequenceRoster()
    for name, is_priority in (("a", False), ("b", True), ("c", False), ("d", True)):
        lanes.push(add(roster, make_request(name, 4, is_priority=is_priority)))
    assert [sequence.request.request_id for sequence in lanes] == ["b", "d", "a", "c"]


def test_full_lanes_refuse_with_a_retry_hint():
    lanes, roster = WaitingLanes(1), SequenceRoster()
    lanes.push(add(roster, make_request("a", 4)))
    with pytest.raises(Overloaded) as caught:
        lanes.require_room()
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_is_not_newer_is_stale_and_counted(attempt: int):
    roster = SequenceRoster()
    add(roster, make_request("a", 4, attempt=2))
    with pytest.raises(StaleAttempt):
        roster.older_attempt(make_request("a", 4, attempt=attempt))
    assert roster.num_stale_refused == 1


def test_a_newer_attempt_names_the_one_it_replaces():
    roster = SequenceRoster()
    old = add(roster, make_request("a", 4))
    assert roster.older_attempt(make_request("a", 4, attempt=2)) is old


@pytest.mark.parametrize(
    ("name", "attempt", "stage"),
    [
        ("b", None, Stage.WAITING),
        ("a", 1, Stage.WAITING),
        ("a", 3, Stage.WAITING),
        ("a", 2, Stage.HELD),
    ],
)
def test_a_sequence_is_found_only_by_its_id_attempt_and_stage(
    name: str, attempt: int | None, stage: Stage
):
    roster = SequenceRoster()
    mine = add(roster, make_request("a", 4, attempt=2))
    assert roster.require(RequestId("a"), 2, Stage.WAITING) is mine
    with pytest.raises(StaleAttempt):
        roster.require(RequestId(name), attempt, stage)


def test_only_requests_whose_budget_ran_out_are_expired():
    roster = SequenceRoster()
    add(roster, make_request("never", 4), now_s=0.0)
    add(roster, make_request("soon", 4, deadline_s=2.0), now_s=10.0)
    add(roster, make_request("later", 4, deadline_s=9.0), now_s=10.0)
    assert roster.expired(11.9) == ()
    assert roster.expired(12.0) == ("soon",)


@pytest.mark.parametrize(
    ("num_pending", "expected"),
    [(1, 256), (1000, 256), (1500, 384), (8192, 2048), (100_000, 2048)],
)
def test_a_chunk_of_a_pipeline_is_a_share_of_what_waits_in_whole_tiles(
    num_pending: int, expected: int
):
    assert chunk_budget(2048, num_pending, 2) == expected
