"""The policy in a small queueing model, on the shapes that loads have."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscaler.settings import PoolRange, ScalingSettings
from pdserve.request import Role
from tests.support.scaling_model import PROFILE, ScalingModel, optimum_replica_s

SETTINGS = ScalingSettings(
    prefill=PoolRange(least=1, most=20),
    decode=PoolRange(least=1, most=20),
    ttft_s=1.0,
    tpot_s=0.05,
)


def step(at_s: float) -> float:
    return 8.0 if at_s < 900 else 9.6


def ramp(at_s: float) -> float:
    return 2.0 + min(at_s, 1200.0) / 1200.0 * 13.0


def diurnal(at_s: float) -> float:
    return 1.0 + 7.0 * (1.0 - math.cos(2 * math.pi * at_s / 3600.0))


def burst(at_s: float) -> float:
    return 20.0 if at_s % 900 < 120 else 4.0


def idle(at_s: float) -> float:
    return 8.0 if at_s < 300 or at_s > 1500 else 0.0


@pytest.mark.parametrize("is_fitted", [True, False], ids=["predictor", "measured"])
@pytest.mark.parametrize(
    ("rate", "duration_s", "attained", "times_optimum"),
    [
        pytest.param(step, 1800, 0.99, 2.0, id="step"),
        pytest.param(ramp, 1500, 0.99, 1.2, id="ramp"),
        pytest.param(diurnal, 3600, 0.99, 1.4, id="diurnal"),
        # The first burst comes faster than a replica starts: see the test below.
        pytest.param(burst, 1800, 0.86, 3.7, id="burst"),
        # So does the end of the silence.
        pytest.param(idle, 1800, 0.92, 1.4, id="idle"),
    ],
)
def test_targets_are_met_at_a_bounded_cost(
    rate: Callable[[float], float],
    duration_s: float,
    attained: float,
    times_optimum: float,
    is_fitted: bool,
) -> None:
    model = ScalingModel(SETTINGS, rate, is_fitted=is_fitted, num_prefill=2)
    outcome = model.run(duration_s)
    best = optimum_replica_s(SETTINGS, rate, duration_s)
    assert outcome.attainment(1.0) >= attained
    assert outcome.mean_tpot_s() <= SETTINGS.tpot_s
    for role in Role:
        assert outcome.replica_s[role] <= times_optimum * best[role]
        assert outcome.most_reversals(role) <= 2
    assert outcome.num_killed_first == 0
    if rate is burst:
        # Each burst but the first finds what it needs.
        assert outcome.attainment(1.0, after_s=180) >= 0.98


@pytest.mark.parametrize(
    ("is_fitted", "num_decode"),
    [pytest.param(True, 2, id="predictor"), pytest.param(False, 3, id="measured")],
)
def test_C16_a_fifth_more_load_moves_pools_to_within_one_of_the_ideal(
    is_fitted: bool, num_decode: int
) -> None:
    def more(at_s: float) -> float:
        return 20.0 if at_s < 600 else 24.0

    model = ScalingModel(
        SETTINGS, more, is_fitted=is_fitted, num_prefill=6, num_decode=num_decode, cold_factor=6.0
    )
    outcome = model.run(1500)
    best = optimum_replica_s(SETTINGS, lambda _: 24.0, 100.0)
    for role in Role:
        ideal = best[role] / 100.0
        sizes = [outcome.size_at(at_s, role) for at_s in range(660, 1500, 20)]
        assert min(sizes) >= ideal - 1
        assert max(sizes) <= ideal + 1
        assert outcome.most_reversals(role) <= 1


def test_G9_load_that_sways_by_a_fifth_makes_no_more_than_one_reversal_in_ten_minutes() -> None:
    def sway(at_s: float) -> float:
        return 10.0 * (1.2 if at_s % 240 < 120 else 0.8)

    outcome = ScalingModel(SETTINGS, sway, num_prefill=4, num_decode=2).run(2400)
    assert outcome.attainment(1.0, after_s=60) >= 0.98
    assert max(outcome.most_reversals(role) for role in Role) <= 1


@pytest.mark.parametrize("is_fitted", [True, False], ids=["predictor", "measured"])
def test_dynamos_queue_of_160_seconds_cannot_build_up(is_fitted: bool) -> None:
    # Prompts take twice as long as the profile told, and ten times as many come at once.
    slow = replace(PROFILE, prefill=(0.02, 0.0004, 0.0))

    def sudden(at_s: float) -> float:
        return 1.0 if at_s < 120 else 10.0

    outcome = ScalingModel(SETTINGS, sudden, is_fitted=is_fitted, actual=slow).run(900)
    assert outcome.worst_ttft_s() < 40
    assert outcome.attainment(1.0, after_s=200) >= 0.95


def test_C18_pools_keep_their_size_while_the_registry_and_then_the_router_is_away() -> None:
    settings = replace(SETTINGS, lost_s=400.0)
    model = ScalingModel(settings, lambda _: 8.0, num_prefill=3, num_decode=1)
    model.is_registry_away = lambda at_s: 400 < at_s < 700
    model.is_router_away = lambda at_s: 800 < at_s < 1100
    outcome = model.run(1200)
    best = optimum_replica_s(settings, lambda _: 8.0, 100.0)
    sizes = {role: {outcome.size_at(at_s, role) for at_s in range(400, 1100, 10)} for role in Role}
    assert sizes[Role.PREFILL] == {best[Role.PREFILL] / 100.0}
    # By chance there are more sequences at once than one replica takes on target.
    assert sizes[Role.DECODE] <= {best[Role.DECODE] / 100.0, best[Role.DECODE] / 100.0 + 1}
    assert [d for d in outcome.decisions if 800 < d.at_s < 1100] == []
    assert outcome.attainment(1.0) >= 0.98


def test_pools_that_were_empty_serve_the_first_request_after_one_start() -> None:
    settings = replace(
        SETTINGS, prefill=PoolRange(least=0, most=4), decode=PoolRange(least=0, most=4)
    )

    def rare(at_s: float) -> float:
        return 2.0 if at_s < 60 or at_s > 900 else 0.0

    outcome = ScalingModel(settings, rare, start_s=15.0).run(1000)
    assert (outcome.size_at(880, Role.PREFILL), outcome.size_at(880, Role.DECODE)) == (0, 0)
    assert outcome.worst_ttft_s() < 25
    late = [job for job in outcome.jobs if job.arrived_s > 950]
    assert late
    assert outcome.attainment(1.0, after_s=950) == 1.0
