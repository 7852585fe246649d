"""Who changes pools: for want of room, or because it is quicker than a start."""

from dataclasses import replace

import pytest

from pdserve.request import Role
from tests.unit.autoscaler.clocked_policy import SETTINGS, Clocked, kinds, worker


def test_full_house_flips_a_replica_that_the_other_pool_can_spare() -> None:
    clocked = Clocked(replace(SETTINGS, most_in_all=3))
    loaded = worker("prefill-0", queued_tokens=500_000, num_running=1)
    spare = (worker("decode-0", num_running=2), worker("decode-1"))
    decisions = clocked.see(loaded, *spare)
    assert kinds(decisions) == [("flip", Role.PREFILL, 2)]
    assert decisions[0].retired == ("decode-1",)
    leaving = replace(spare[1], is_draining=True, is_serving=False)
    assert clocked.see(loaded, spare[0], leaving, seconds=10) == []
    assert kinds(clocked.see(loaded, spare[0])) == [("grow", Role.PREFILL, 2)]


def test_full_house_flips_nobody_whom_the_other_pool_needs() -> None:
    clocked = Clocked(replace(SETTINGS, most_in_all=3))
    loaded = worker("prefill-0", queued_tokens=500_000, num_running=1)
    busy = [worker(f"decode-{i}", num_running=10, used_blocks=450) for i in range(2)]
    assert clocked.see(loaded, *busy, seconds=20) == []


IN_PLACE = replace(SETTINGS, flips_in_place=True, drain_s=9.0, change_s=1.0, start_s=30.0)
LOADED = worker("prefill-0", queued_tokens=500_000, num_running=1)


@pytest.mark.parametrize(
    ("drain_s", "start_s", "num_running", "kind"),
    [
        pytest.param(9.0, 30.0, 2, "flip", id="9 + 1 s of flip against 30 s of start"),
        pytest.param(60.0, 30.0, 2, "grow", id="long streams against 30 s of start"),
        pytest.param(60.0, 30.0, 0, "flip", id="nothing to drain"),
        pytest.param(9.0, 0.5, 0, "grow", id="a start faster than the change itself"),
    ],
)
def test_flip_in_place_is_taken_where_it_serves_sooner_than_a_start(
    drain_s: float, start_s: float, num_running: int, kind: str
) -> None:
    settings = replace(IN_PLACE, drain_s=drain_s, start_s=start_s)
    spare = (worker("decode-0", num_running=3), worker("decode-1", num_running=num_running))
    (decision,) = Clocked(settings).see(LOADED, *spare)
    assert kinds([decision]) == [(kind, Role.PREFILL, 2)]
    assert decision.retired == (("decode-1",) if kind == "flip" else ())


def test_flip_times_that_were_seen_count_more_than_those_assumed() -> None:
    clocked = Clocked(IN_PLACE)
    spare = [worker(f"decode-{i}", num_running=2 + i) for i in range(3)]
    (decision,) = clocked.see(LOADED, *spare)
    assert (decision.kind, decision.retired) == ("flip", ("decode-0",))
    # It drains for two minutes before it serves in its new pool: the mean is 65 s from then on.
    calm = replace(LOADED, queued_tokens=0)
    comes = replace(spare[0], role=Role.PREFILL, is_serving=False)
    clocked.see(calm, comes, *spare[1:], seconds=120)
    serves = replace(comes, is_serving=True, queued_tokens=500_000)
    decisions = clocked.see(LOADED, serves, *spare[1:], seconds=60)
    assert {decision.kind for decision in decisions if decision.role is Role.PREFILL} == {"grow"}


def test_replica_that_flips_counts_as_starting_in_its_new_pool() -> None:
    clocked = Clocked(IN_PLACE)
    spare = (worker("decode-0", num_running=2), worker("decode-1"))
    clocked.see(LOADED, *spare)
    comes = replace(spare[1], role=Role.PREFILL, is_serving=False)
    assert clocked.see(replace(LOADED, queued_tokens=0), spare[0], comes, seconds=10) == []
    numbers = clocked.policy.numbers
    assert (numbers[Role.PREFILL].num_serving, numbers[Role.PREFILL].num_starting) == (1, 1)
    assert numbers[Role.DECODE].num_active == 1


def test_flip_needs_no_room_and_what_else_is_needed_starts_beside_it() -> None:
    many = [worker(f"prefill-{i}", queued_tokens=10**6) for i in range(3)]
    spare = (worker("decode-0", num_running=2), worker("decode-1"))
    decisions = Clocked(replace(IN_PLACE, most_in_all=6)).see(*many, *spare)
    assert kinds(decisions) == [("flip", Role.PREFILL, 4), ("grow", Role.PREFILL, 5)]


def test_flips_go_both_ways() -> None:
    full = worker("decode-0", num_running=60, used_blocks=900)
    pair = (worker("prefill-0", num_running=1), worker("prefill-1"))
    decisions = Clocked(IN_PLACE).see(*pair, full)
    assert kinds(decisions) == [("flip", Role.DECODE, 2)]
    assert decisions[0].retired == ("prefill-1",)


def test_last_replica_that_serves_does_not_flip_although_another_one_starts() -> None:
    starting = worker("decode-1", is_serving=False)
    decisions = Clocked(IN_PLACE).see(LOADED, worker("decode-0"), starting)
    assert kinds(decisions) == [("grow", Role.PREFILL, 2)]


def test_nobody_flips_whom_its_pool_needs() -> None:
    busy = [worker(f"decode-{i}", num_running=10, used_blocks=450) for i in range(2)]
    assert kinds(Clocked(IN_PLACE).see(LOADED, *busy)) == [("grow", Role.PREFILL, 2)]
