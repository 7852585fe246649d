"""What is made of the times of requests: the kill of a worker, objectives, ratios, shapes."""

import pytest

from benchmarks.four_clusters import goodput, kill_figures, make_records
from benchmarks.four_gpus import PARTS, RATIOS, against_one_gpu, winners
from benchmarks.four_predictions import workload_of
from benchmarks.four_scale import ON_GPUS, TRIAL, Load
from benchmarks.serving_load import Answered, LoadPoint
from simulation.report import Slo

LOAD = Load(prompt_tokens=8, output_tokens=5, rates_per_s=(1,), slo=Slo(ttft_s=0.2, tpot_s=0.02))


def answer(sent_s: float, gaps_ms: list[float], error: str | None = None) -> Answered:
    """A request whose tokens came after these gaps, one at a time."""
    at_s, now_s = [], sent_s
    for gap_ms in gaps_ms:
        now_s += gap_ms / 1e3
        at_s.append(now_s)
    ids = list(range(len(at_s)))
    return Answered(
        sent_s=sent_s, at_s=at_s, num_tokens=[1] * len(at_s), token_ids=ids, error=error
    )


def test_whoever_waits_over_the_kill_is_affected_and_others_are_not() -> None:
    affected = answer(0.0, [100, 10, 10, 900, 10])
    other = answer(0.0, [100, 10, 10, 11, 10])
    before = answer(-5.0, [100, 10, 10, 10, 10])
    lost = answer(0.0, [100], error="the answer ended too early")
    found = kill_figures([affected, other, before, lost], 0.125, None)
    assert found["requests_affected"] == 1
    assert found["stall_max_ms"] == pytest.approx(900)
    assert found["others_itl_p99_ms"] == pytest.approx(10)
    assert found["requests_lost"] == 1
    assert found["requests_with_wrong_tokens"] is None


def test_wrong_tokens_are_counted_by_request() -> None:
    answers = [answer(0.0, [10, 10]), answer(0.0, [10, 10])]
    assert kill_figures(answers, 9.0, [[0, 1], [0, 2]])["requests_with_wrong_tokens"] == 1


def test_only_requests_that_keep_both_objectives_are_good() -> None:
    answers = [
        answer(0.0, [100, 10, 10, 10, 10]),
        answer(1.0, [300, 10, 10, 10, 10]),
        answer(2.0, [100, 30, 30, 30, 30]),
        answer(4.0, [100, 10]),
    ]
    assert goodput(make_records(answers, LOAD.output_tokens), LOAD) == pytest.approx(1 / 4)


def test_the_best_ratio_is_told_as_measured_and_as_predicted() -> None:
    rows = [
        {"pools": "a", "goodput_per_s": 3.0, "predicted_goodput_per_s": 4.0, "goodput_error": 0.33},
        {"pools": "b", "goodput_per_s": 5.0, "predicted_goodput_per_s": 3.5, "goodput_error": -0.3},
    ]
    (found,) = winners(rows, LOAD)
    assert (found["measured"], found["predicted"]) == ("b", "a")


def test_shapes_are_held_against_one_gpu_by_throughput_and_by_time() -> None:
    parts = {
        "ranks-1": {
            "rows": [{"bench": "decode 1", "tokens_per_s": 100.0}, {"bench": "p", "ms": 6}]
        },
        "ranks-tp4": {
            "rows": [
                {"bench": "decode 1", "shape": "TP4", "tokens_per_s": 250.0},
                {"bench": "p", "shape": "TP4", "ms": 2},
            ]
        },
    }
    assert [row["gain"] for row in against_one_gpu(parts)] == [2.5, 3.0]


def test_the_simulated_requests_are_those_that_are_sent() -> None:
    point = LoadPoint(num_requests=50, prompt_tokens=8, output_tokens=5, rate_per_s=10.0, seed=1)
    arrivals = workload_of(point).arrivals
    assert len(arrivals) == 50
    assert 2 < arrivals[-1].at_s < 12
    assert {(one.num_prompt_tokens, one.num_output_tokens) for one in arrivals} == {(8, 5)}


def test_every_ratio_takes_four_gpus_and_every_load_has_a_part() -> None:
    assert {pools.num_gpus for pools in RATIOS} == {4}
    assert ON_GPUS.loads.keys() == TRIAL.loads.keys()
    assert {f"ratios-{word}" for word in ON_GPUS.loads} < PARTS.keys()
