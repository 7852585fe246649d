"""What went wrong with autoscalers elsewhere, in a simulated cluster with ours."""

from dataclasses import replace

import pytest

from autoscaler.figures import Reading
from autoscaler.settings import PoolRange
from benchmarks.autoscaler import LENGTHS, PROFILE, SETTINGS
from pdserve.request import Role
from simulation.clairvoyant import optimum_sizes, stretches_at
from simulation.generators import make_shaped
from simulation.load_shapes import bursts, idle, step, sway
from simulation.record import Outcome
from simulation.workload import Arrival, Piece, make_workload
from tests.support.scaled_load import ScaledLoad, fixed


@pytest.mark.parametrize(
    "has_samples",
    [
        pytest.param(True, id="predictor"),
        pytest.param(False, id="measured", marks=pytest.mark.soak),
    ],
)
def test_C16_a_fifth_more_load_moves_pools_to_within_one_of_the_ideal(has_samples: bool) -> None:
    load = ScaledLoad(
        step(6.0, 7.2, 150.0), 550.0, sizes=(4, 2), cold_factor=6.0, has_samples=has_samples
    )
    outcome = load.run()
    (after,) = {
        tuple(optimum_sizes(one, load.shape, SETTINGS).items())
        for one in stretches_at(lambda _: 7.2, 5.0, load.workload, load.shape)
    }
    for role, ideal in after:
        sizes = load.sizes(role, 210.0, 550.0)
        assert min(sizes) >= ideal - 1
        assert max(sizes) <= ideal + 1
        assert outcome.pools[role].reversals <= 1


def test_G9_load_that_sways_by_a_fifth_makes_no_more_than_one_reversal_in_ten_minutes() -> None:
    load = ScaledLoad(sway(4.0, 0.2, 240.0), 960.0, sizes=(3, 2))
    outcome = load.run()
    assert load.attainment(after_s=60.0) >= 0.98
    assert max(pool.reversals for pool in outcome.pools.values()) <= 1


FAR_TOO_FAST = replace(PROFILE, prefill=(0.002, 0.00004, 0.0))
FAR_TOO_SLOW = replace(PROFILE, prefill=(0.4, 0.008, 0.0))


@pytest.mark.parametrize(
    "profiles",
    [
        pytest.param(None, id="right"),
        pytest.param((PROFILE,), id="wrong", marks=pytest.mark.soak),
        pytest.param((), id="none"),
        pytest.param((FAR_TOO_FAST,), id="far too fast"),
        pytest.param((FAR_TOO_SLOW,), id="far too slow", marks=pytest.mark.soak),
    ],
)
def test_dynamos_queue_of_160_seconds_cannot_build_up(profiles: tuple[object, ...] | None) -> None:
    # Ten times as many prompts at once, that take twice as long as a profile told.
    slow = replace(PROFILE, prefill=(0.04, 0.0008, 0.0))
    load = ScaledLoad(step(0.4, 4.0, 100.0), 450.0, actual=slow, profiles=profiles)
    outcome = load.run()
    assert outcome.worst_ttft_s < 40.0
    assert load.attainment(after_s=220.0) >= 0.95


def test_prompts_that_are_late_on_any_replica_do_not_make_a_pool_grow_and_grow() -> None:
    # One in a minute takes 10 s by itself; the others keep one replica a quarter busy.
    lengths = replace(LENGTHS, spread=0.2)
    plain = make_shaped("plain", lambda _: 0.6, 600.0, lengths, 1)
    long = [
        Arrival(at_s=30.0 + 60.0 * n, pieces=(Piece(10_000 + n, 24_000),), num_output_tokens=50)
        for n in range(9)
    ]
    workload = make_workload("long prompts", [*plain.arrivals, *long])
    load = ScaledLoad(lambda _: 0.6, 600.0, sizes=(2, 1), workload=workload)
    load.run()
    # A rule that took each long prompt for a queue ended with 11.
    assert max(load.sizes(Role.PREFILL, 0.0, 600.0)) <= 3
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}


def test_prompt_that_is_computed_waits_for_nobody_and_the_one_behind_it_does() -> None:
    # The first takes 10 s by itself, on the only replica.
    prompts = ((1.0, 24_000), (3.0, 500))
    arrivals = [
        Arrival(at_s=at_s, pieces=(Piece(number, size),), num_output_tokens=5)
        for number, (at_s, size) in enumerate(prompts)
    ]
    load = ScaledLoad(
        lambda _: 0.2,
        10.0,
        sizes=(1, 1),
        settings=fixed(1, 1),
        workload=make_workload("two", arrivals),
    )
    load.run()
    oldest_s = {at_s: one.traffic.oldest_s for at_s, one in load.readings.items() if one.traffic}
    assert oldest_s[2.0] == 0.0
    assert oldest_s[9.0] == 6.0
    assert oldest_s[12.0] == 0.0


def test_C18_nothing_changes_and_nothing_fails_while_registry_and_router_are_away() -> None:
    load = ScaledLoad(lambda _: 4.0, 600.0, sizes=(3, 2), settings=replace(SETTINGS, lost_s=400.0))

    def away(now_s: float, reading: Reading) -> Reading:
        if 100 < now_s < 400:
            gone = tuple(replace(one, is_serving=False) for one in reading.workers)
            return replace(reading, workers=gone)
        return replace(reading, traffic=None) if 450 < now_s < 600 else reading

    load.alter = away
    load.run()
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert load.sizes(Role.PREFILL, 100.0, 600.0) == {3}
    assert load.sizes(Role.DECODE, 100.0, 400.0) <= {1, 2}
    assert [one for one in load.result.decisions if 450 < one.at_s < 600] == []
    assert load.attainment(after_s=0.0) >= 0.98


def test_C15_replicas_that_only_start_leave_before_any_that_serves() -> None:
    # The burst ends before what it made start serves.
    settings = replace(SETTINGS, settle_s=20.0, shrink_pause_s=5.0, burst_memory_s=0.0)
    load = ScaledLoad(bursts(1.0, 10.0, every_s=150.0, length_s=20.0), 300.0, settings=settings)
    load.run()
    shrinks = [one for one in load.result.decisions if one.kind == "shrink"]
    assert shrinks
    for one in shrinks:
        pool = [each for each in load.readings[one.at_s].workers if each.role is one.role]
        starting = {each.worker_id for each in pool if not each.is_serving and not each.is_draining}
        assert starting <= set(one.retired) or not (
            {each.worker_id for each in pool if each.is_serving} & set(one.retired)
        )
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert {one.attempts for one in load.result.records} == {1}


def test_pools_that_were_empty_serve_the_first_request_after_one_start() -> None:
    settings = replace(
        SETTINGS, prefill=PoolRange(least=0, most=4), decode=PoolRange(least=0, most=4)
    )
    load = ScaledLoad(idle(1.0, 60.0, 900.0), 1000.0, settings=settings, start_s=15.0)
    outcome = load.run()
    assert load.sizes(Role.PREFILL, 800.0, 900.0) == load.sizes(Role.DECODE, 800.0, 900.0) == {0}
    assert 15.0 < outcome.worst_ttft_s < 25.0
    assert load.attainment(after_s=950.0) == 1.0


def test_a_pool_in_need_gets_a_replica_of_the_other_one_that_has_spare() -> None:
    settings = replace(SETTINGS, flips_in_place=True, most_in_all=5)
    load = ScaledLoad(step(1.0, 5.0, 120.0), 400.0, sizes=(1, 4), settings=settings)
    outcome = load.run()
    flips = [one for one in load.result.decisions if one.kind == "flip"]
    assert flips
    assert {one.role for one in flips} == {Role.PREFILL}
    # It drains and changes in less time than a start of 20 s takes.
    assert outcome.worst_ttft_s < 15.0
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert sum(pool.mean_size for pool in outcome.pools.values()) <= 5.0


def test_a_replica_that_dies_under_load_is_back_and_nothing_is_lost() -> None:
    load = ScaledLoad(lambda _: 4.0, 300.0, sizes=(3, 2))
    load.at(100.0, lambda: load.cluster.kill(load.key("prefill-0")))
    load.at(150.0, lambda: load.cluster.kill(load.key("decode-0")))
    load.run()
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert load.attainment(after_s=200.0) >= 0.97
    assert max(load.sizes(Role.PREFILL, 100.0, 300.0)) <= 4
