from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from simulation.bounds import hopeless_share, lower_bounds
from simulation.generators import Lengths, make_plain
from simulation.page import COLUMNS, cells_of, make_page
from simulation.profile_files import find_profile, list_profiles
from simulation.report import GapHistogram, Slo, percentile_of, spread_of
from simulation.sampling import Sample
from simulation.search import Plan, Search, coarse
from simulation.workload import Arrival, Piece, Workload, make_workload

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.004, 2e-5, 0.0),
    decode=(0.004, 2e-5, 3e-8),
    transfer=(0.001, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=64_000,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
)
SLO = Slo(ttft_s=0.5, tpot_s=0.02)


def workload_of(rate_per_s: float, num_requests: int = 300) -> Workload:
    lengths = Lengths(mean_prompt_tokens=800, mean_output_tokens=30)
    return make_plain(num_requests, rate_per_s, lengths, 1)


def plan_of(workload: Workload, *profiles: Profile, slo: Slo = SLO, **over: object) -> Plan:
    sample = Sample(workload=workload, num_warm_up=0, text="all")
    return Search(sample=sample, slo=slo, **over).run(profiles or (PROFILE,))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(workload_of(140.0))


def test_the_chosen_plan_keeps_the_objectives_and_no_smaller_tried_one_does(plan: Plan):
    chosen = plan.chosen
    assert chosen is not None
    assert chosen.report.attainment >= 0.95
    for trial in plan.trials:
        if trial.num_gpus < chosen.num_gpus:
            assert trial.report.attainment < 0.95
    # 140 prompts a second of 20 ms each keep 2.8 workers busy.
    assert chosen.num_prefill >= 3


def test_no_plan_is_tried_twice(plan: Plan):
    sizes = [(trial.num_prefill, trial.num_decode) for trial in plan.trials]
    assert len(sizes) == len(set(sizes))


def test_the_frontier_has_the_chosen_plan_at_rising_rates(plan: Plan):
    rates = [trial.rate for trial in plan.frontier]
    assert rates == sorted(rates)
    assert plan.chosen in plan.frontier
    first, last = plan.frontier[0].report, plan.frontier[-1].report
    assert last.ttft.p99_s > first.ttft.p99_s


def test_more_load_needs_more_workers(plan: Plan):
    few, many = plan_of(workload_of(40.0)).chosen, plan.chosen
    assert few is not None
    assert many is not None
    assert many.num_gpus > few.num_gpus


def test_the_kind_of_worker_with_the_fewest_gpus_is_taken():
    twice = replace(PROFILE, worker_class="twice", num_gpus=4, prefill=(0.002, 1e-5, 0.0))
    chosen = plan_of(workload_of(60.0), PROFILE, twice).chosen
    assert chosen is not None
    assert chosen.profile.worker_class == "toy"


def test_objectives_that_nobody_can_keep_give_no_plan():
    plan = plan_of(workload_of(20.0), slo=Slo(ttft_s=0.001, tpot_s=0.02))
    assert plan.chosen is None
    assert plan.hopeless_share == 1.0
    assert "No plan" in make_page(plan, "toy")


def test_limits_on_workers_are_kept():
    plan = plan_of(workload_of(400.0), max_workers=2)
    assert plan.chosen is None
    assert [trial.num_gpus for trial in plan.trials] == [2]


def test_a_request_that_fits_no_worker_is_refused_by_name():
    arrival = Arrival(at_s=0, pieces=(Piece(1, 70_000),), num_output_tokens=1)
    with pytest.raises(ConfigError, match="70001 tokens"):
        plan_of(make_workload("w", [arrival]))


def test_a_page_holds_the_plan_and_its_curves(plan: Plan):
    page = make_page(plan, "a <model>")
    assert "a &lt;model&gt;" in page
    assert page.count("<svg") == 3
    assert page.count("<tr") == len(plan.trials) + len(plan.frontier) + 2
    assert "http" not in page


def test_a_line_of_the_table_has_all_columns(plan: Plan):
    assert all(len(cells_of(trial)) == len(COLUMNS) for trial in plan.trials)


def test_bounds_grow_with_the_rate_and_shrink_with_what_is_shared():
    slow, fast = lower_bounds(workload_of(10.0), PROFILE), lower_bounds(workload_of(20.0), PROFILE)
    assert fast[0] == pytest.approx(2 * slow[0], rel=0.01)
    assert fast[1] > slow[1]
    own = [
        Arrival(at_s=i, pieces=(Piece(i, 500), Piece(99 + i, 10)), num_output_tokens=5)
        for i in range(50)
    ]
    shared = [replace(one, pieces=(Piece(0, 500), one.pieces[1])) for one in own]
    assert (
        lower_bounds(make_workload("s", shared), PROFILE)[0]
        < lower_bounds(make_workload("o", own), PROFILE)[0] / 5
    )


def test_requests_that_are_too_long_for_the_objective_are_hopeless():
    lengths = (1000, 1000, 1000, 40_000)
    workload = make_workload(
        "w",
        [
            Arrival(at_s=i, pieces=(Piece(i, n),), num_output_tokens=1)
            for i, n in enumerate(lengths)
        ],
    )
    assert hopeless_share(workload, PROFILE, 0.5) == 0.25


def test_blocks_are_made_coarser_never_finer():
    assert coarse(PROFILE).block_size == 128
    assert coarse(replace(PROFILE, block_size=256)).block_size == 256


def test_the_shipped_profile_is_found_by_device_by_name_and_by_path():
    assert "h200-llama-3-8b" in list_profiles()
    by_device = find_profile("h200", "llama-3-8b")
    assert find_profile("h200-llama-3-8b", "llama-3-8b") == by_device
    path = Path(__file__).parents[3] / "simulation/profiles/h200-llama-3-8b.json"
    assert find_profile(str(path), "llama-3-8b") == by_device
    # 64 sequences of 512 tokens: 5.7 ms measured.
    assert by_device.decode_step_s(64, 64 * 580) == pytest.approx(0.0057, rel=0.05)


def test_a_profile_of_another_model_or_none_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is of model llama-3-8b"):
        find_profile("h200-llama-3-8b", "qwen")
    with pytest.raises(ConfigError, match="h200-llama-3-8b"):
        find_profile("b200", "llama-3-8b")
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="broken"):
        find_profile(str(broken), "llama-3-8b")


def test_percentiles_are_values_that_were_seen():
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile_of(ordered, percent) for percent in (50, 99, 100)] == [50, 99, 100]
    assert spread_of([]).p50_s is None


def test_the_histogram_of_gaps_is_within_two_per_cent():
    gaps = GapHistogram()
    for value in range(1, 1001):
        gaps.add(value / 1000, 3)
    assert gaps.num_gaps == 3000
    assert gaps.percentile(50) == pytest.approx(0.5, rel=0.02)
    assert gaps.percentile(99) == pytest.approx(0.99, rel=0.02)
    assert GapHistogram().percentile(50) is None
