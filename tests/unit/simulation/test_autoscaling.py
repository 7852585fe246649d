"""The autoscaler of production in a simulated cluster, on the shapes that loads have."""

import pytest

from benchmarks.autoscaler import SETTINGS
from pdserve.request import Role
from simulation.load_shapes import Rate, bursts, diurnal, idle, ramp, step
from tests.support.scaled_load import ScaledLoad

BURSTS = bursts(2.0, 10.0, every_s=450.0, length_s=100.0)


@pytest.mark.parametrize(
    ("rate", "duration_s", "attained", "times_optimum"),
    [
        pytest.param(step(4.0, 4.8, 300.0), 700.0, 0.99, 2.0, id="step"),
        pytest.param(ramp(1.0, 5.0, 500.0), 600.0, 0.98, 1.3, id="ramp"),
        pytest.param(diurnal(0.5, 5.5, 1200.0), 1200.0, 0.98, 1.6, id="diurnal"),
        # The first burst comes faster than a replica starts: see below.
        pytest.param(BURSTS, 700.0, 0.75, 4.5, id="burst"),
        # So does the end of the silence.
        pytest.param(idle(4.0, 200.0, 1000.0), 1240.0, 0.85, 1.6, id="idle"),
    ],
)
def test_targets_are_met_at_a_bounded_cost(
    rate: Rate, duration_s: float, attained: float, times_optimum: float
) -> None:
    load = ScaledLoad(rate, duration_s)
    outcome = load.run()
    report = outcome.report
    assert report.num_done == report.num_requests
    assert report.ttft_attainment >= attained
    assert report.tpot.mean_s is not None
    assert report.tpot.mean_s <= SETTINGS.tpot_s
    for pool in outcome.pools.values():
        assert pool.times_optimum <= times_optimum
        assert pool.reversals <= 2
    if rate is BURSTS:
        # The second burst finds what it needs.
        assert load.attainment(after_s=400.0) >= 0.98


def test_without_a_word_of_what_steps_take_nearly_all_requests_are_in_time() -> None:
    load = ScaledLoad(step(4.0, 4.8, 200.0), 500.0, profiles=(), has_samples=False)
    outcome = load.run()
    assert outcome.report.num_done == outcome.report.num_requests
    assert outcome.report.ttft_attainment >= 0.98


def test_pools_without_any_request_go_to_their_least_size() -> None:
    load = ScaledLoad(idle(3.0, 30.0, 400.0), 30.0, sizes=(3, 2))
    load.cluster.run(load.workload, until_s=400.0)
    assert load.sizes(Role.PREFILL, 390.0, 400.0) == {1}
    assert load.sizes(Role.DECODE, 390.0, 400.0) == {1}
