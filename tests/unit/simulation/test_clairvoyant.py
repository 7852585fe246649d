"""The optimum that scaled pools are held against, and what a run of them is summed up to."""

from dataclasses import replace

import pytest

from autoscaler.figures import Decision
from autoscaler.settings import PoolRange
from benchmarks.autoscaler import PROFILE, SETTINGS
from pdserve.request import Role
from simulation.clairvoyant import Stretch, optimum_replica_s, optimum_sizes, stretches_of
from simulation.load_shapes import bursts, diurnal, idle, ramp, step, sway
from simulation.record import Outcome
from simulation.scaling_report import most_reversals
from simulation.shape import ClusterShape
from simulation.workload import Arrival, Piece, make_workload
from tests.support.scaled_load import ScaledLoad, fixed

SHAPE = ClusterShape(prefill=PROFILE, decode=PROFILE, num_prefill=1, num_decode=1)


def stretch(requests_per_s: float, seconds: float = 60.0) -> Stretch:
    return Stretch(
        seconds=seconds,
        requests_per_s=requests_per_s,
        service_s=0.42,
        output_tokens=100,
        context_tokens=1050,
    )


def test_the_optimum_of_decode_holds_the_sequences_there_are_but_for_a_tail():
    # 25 sequences make a step of 50 ms; 7.6 requests a second of 100 tokens of 50 ms are 38, and
    # in 95 % of the time no more than 38 + 1.645 x 6.2 = 48.1.
    assert optimum_sizes(stretch(7.6), SHAPE, SETTINGS)[Role.DECODE] == 2
    assert optimum_sizes(stretch(8.1), SHAPE, SETTINGS)[Role.DECODE] == 3


def test_the_optimum_stays_within_the_pools_ranges():
    narrow = replace(SETTINGS, prefill=PoolRange(least=2, most=3))
    assert optimum_sizes(stretch(0.0), SHAPE, narrow) == {Role.PREFILL: 2, Role.DECODE: 1}
    assert optimum_sizes(stretch(50.0), SHAPE, narrow)[Role.PREFILL] == 3


def test_kv_that_is_short_bounds_the_batch_too():
    small = replace(PROFILE, kv_tokens=12_800)
    shape = replace(SHAPE, prefill=small, decode=small)
    # 80 % of 12,800 tokens hold 9 sequences of 1,050; there are up to 61.6.
    assert optimum_sizes(stretch(10.0), shape, SETTINGS)[Role.DECODE] == 7


def test_replica_seconds_of_the_optimum_are_summed_over_stretches():
    spent = optimum_replica_s([stretch(10.0), stretch(0.0, 30.0)], SHAPE, SETTINGS)
    assert spent[Role.DECODE] == 3 * 60.0 + 30.0


def test_a_workload_is_cut_into_windows_and_what_was_asked_before_is_cached():
    workload = make_workload(
        "w",
        [
            Arrival(at_s=at_s, pieces=(Piece(1, 1000),), num_output_tokens=10)
            for at_s in (1.0, 61.0, 62.0, 240.0)
        ],
    )
    found = list(stretches_of(workload, SHAPE, 60.0))
    assert [one.requests_per_s * 60.0 for one in found] == [1.0, 2.0, 0.0, 1.0]
    assert found[0].service_s == pytest.approx(PROFILE.prefill_s(1000, 0))
    assert found[1].service_s == pytest.approx(PROFILE.prefill_s(1, 999))
    assert found[2].service_s == 0.0


def test_the_optimum_of_a_short_trace_lasts_no_longer_than_the_trace():
    workload = make_workload(
        "w",
        [
            Arrival(at_s=at_s, pieces=(Piece(1, 1000),), num_output_tokens=10)
            for at_s in (1.0, 9.0, 18.0)
        ],
    )
    (found,) = stretches_of(workload, SHAPE, 60.0)
    assert found.seconds == 18.0
    assert found.requests_per_s == pytest.approx(3 / 18)


def test_shapes_of_load_are_what_their_names_say():
    assert [step(1, 2, 10)(at_s) for at_s in (9.9, 10.0)] == [1, 2]
    assert [ramp(1, 3, 10)(at_s) for at_s in (0, 5, 20)] == [1, 2, 3]
    assert [round(diurnal(1, 5, 100)(at_s), 6) for at_s in (0, 25, 50)] == [1, 3, 5]
    burst = bursts(1, 9, every_s=100, length_s=10)
    assert [burst(at_s) for at_s in (5, 10, 105, 150)] == [9, 1, 9, 1]
    assert [idle(4, 10, 20)(at_s) for at_s in (9, 10, 20)] == [4, 0, 4]
    assert [sway(10, 0.2, 60)(at_s) for at_s in (0, 30)] == [12, 8]


def decision(at_s: float, role: Role, kind: str) -> Decision:
    return Decision(at_s=at_s, role=role, kind=kind, size=2)  # type: ignore[arg-type]


def test_reversals_are_changes_of_direction_and_a_flip_takes_from_the_other_pool():
    made = [
        decision(0.0, Role.DECODE, "grow"),
        decision(100.0, Role.DECODE, "shrink"),
        decision(200.0, Role.PREFILL, "flip"),
        decision(300.0, Role.DECODE, "grow"),
        decision(2000.0, Role.DECODE, "shrink"),
    ]
    assert most_reversals(made, Role.DECODE) == 2
    assert most_reversals(made, Role.PREFILL) == 0


def test_pools_that_keep_their_sizes_cost_what_they_are():
    load = ScaledLoad(lambda _: 2.0, 120.0, sizes=(3, 1), settings=fixed(3, 1))
    outcome = load.run()
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert outcome.decisions == ()
    assert outcome.pools[Role.PREFILL].replica_hours == pytest.approx(3 * 120 / 3600)
    assert outcome.gpu_hours == pytest.approx(4 * 120 / 3600)
    assert outcome.pools[Role.DECODE].times_optimum == pytest.approx(1.0)
    report = outcome.report
    tokens = load.workload.num_prompt_tokens + load.workload.num_output_tokens
    cost = 4 * report.duration_s / tokens * 1e6
    assert report.gpu_s_per_million_tokens == pytest.approx(cost, rel=0.01)


def test_each_decision_is_kept_with_its_numbers():
    load = ScaledLoad(step(1.0, 6.0, 30.0), 120.0)
    outcome = load.run()
    assert outcome.decisions
    grown = outcome.decisions[0]
    assert (grown.role, grown.kind) == (Role.PREFILL, "grow")
    assert grown.numbers.num_serving == 2
    assert grown.numbers.need > 2
    assert grown.numbers.fit is not None
    # The laws are linear, and so are the steps that were simulated.
    assert grown.numbers.fit.mean_error < 0.01
    assert outcome.pools[Role.PREFILL].most >= grown.size
