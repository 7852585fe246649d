import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli import EXIT_USAGE, run_command
from launcher.commands.plan import EXIT_NO_PLAN, parse_slo
from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from simulation.report import Slo

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.004, 2e-5, 0.0),
    decode=(0.004, 2e-5, 3e-8),
    transfer=(0.001, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=64_000,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    detail={"model": "toy"},
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    rows = [
        {
            "timestamp": 20 * number,
            "input_length": 900,
            "output_length": 20,
            "hash_ids": [number % 5, 100 + number],
        }
        for number in range(150)
    ]
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "toy.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    profile.write_text(PROFILE.to_json(), encoding="utf-8")
    return ["plan", "--trace", str(trace), "--gpu", str(profile), "--model", "toy"]


def test_a_plan_is_printed_and_written(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output, plot = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ["--output", str(output), "--plot", str(plot)]
    assert run_command([*flags, "--slo", "ttft=0.5,tpot=0.02", "--requests", "60", *files]) == 0
    printed = capsys.readouterr()
    assert "GPU seconds per 1M tokens" in printed.out
    assert "of 150 requests" in printed.err
    plan = json.loads(output.read_text(encoding="utf-8"))
    assert plan["chosen"]["attainment"] >= 0.95
    assert plan["chosen"] in plan["trials"]
    assert "of 150 requests" in plan["simulated"]
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_objectives_that_cannot_be_kept_have_a_status_of_their_own(
    flags: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run_command([*flags, "--slo", "ttft=0.001,tpot=0.02"]) == EXIT_NO_PLAN
    assert "cannot keep the TTFT even on idle workers" in capsys.readouterr().out


def test_what_sized_pools_would_have_cost_stands_beside_the_fixed_plan(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output, plot = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ["--output", str(output), "--plot", str(plot)]
    slow = ["--rate", "0.05", "--slo", "ttft=0.5,tpot=0.02", "--requests", "60"]
    ranges = ["--prefill", "1..3", "--decode", "2", "--start-s", "5"]
    assert run_command([*flags, *slow, *ranges, *files]) == 0
    printed = capsys.readouterr()
    assert "autoscaled 1..3 : 2" in printed.out
    assert "Simulating all 150 requests" in printed.err
    found = json.loads(output.read_text(encoding="utf-8"))["scaled"]
    assert found["scaling"]["settings"]["ttft_s"] == 0.5
    assert found["scaled"]["report"]["num_done"] == 150
    pools = found["scaled"]["pools"]
    assert pools["decode"]["replica_hours"] == pytest.approx(2 * found["duration_s"] / 3600)
    assert found["fixed"]["report"]["num_done"] == 150
    # Its plan is of fewer GPUs than the pools begin with, or as many: nothing more is paid for.
    assert found["fixed"]["gpu_hours"] <= found["scaled"]["gpu_hours"]
    assert "autoscaled 1..3 : 2" in plot.read_text(encoding="utf-8")


def test_decisions_of_the_autoscaler_are_printed_and_written_with_their_numbers(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "plan.json"
    # Two requests a second of half a second each are more than one replica does in time.
    slow = ["--rate", "0.06", "--divide-lengths", "0.05", "--slo", "ttft=1.5,tpot=0.03"]
    ranges = ["--prefill", "1..4", "--decode", "1..4", "--start-s", "2"]
    run_command([*flags, *slow, "--requests", "40", *ranges, "--output", str(output)])
    decisions = json.loads(output.read_text(encoding="utf-8"))["scaled"]["scaled"]["decisions"]
    assert decisions
    assert {one["kind"] for one in decisions} <= {"grow", "shrink", "flip"}
    assert decisions[0]["numbers"]["num_serving"] == 1
    printed = capsys.readouterr().out
    assert f"{decisions[0]['role']}: {decisions[0]['kind']} 1 -> 2" in printed


@pytest.mark.parametrize(
    "over",
    [
        ["--prefill", "1..3"],
        ["--prefill", "3..1", "--decode", "1"],
        ["--prefill", "1", "--decode", "0"],
        ["--prefill", "2..3", "--decode", "2..3", "--max-replicas", "3"],
        ["--slo", "ttft=2"],
        ["--gpu", "no-such-device"],
        ["--trace", "/nowhere"],
        ["--model", "other"],
        ["--divide-lengths", "0.01"],
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    flags: list[str], over: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run_command([*flags, *over]) == EXIT_USAGE
    assert capsys.readouterr().err.strip().count("\n") == 0


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e9", "1e400", "much"])
@pytest.mark.parametrize(
    ("flag", "limits"),
    [
        ("--attainment", "from 0.01 to 1"),
        ("--rate", "from 0.001 to 1000"),
        ("--divide-lengths", "from 0.01 to 1000000"),
        ("--start-s", "from 0 to 86400"),
        ("--requests", "from 10 to 1000000"),
        ("--max-workers", "from 2 to 100000"),
        ("--max-replicas", "from 1 to 200000"),
    ],
)
def test_numbers_out_of_range_are_refused_with_value_and_limits(
    flags: list[str], flag: str, value: str, limits: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command([*flags, flag, value]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"pdserve: {flag} must be a ")
    assert f"{limits}, got {value!r}" in told


def test_a_number_out_of_range_in_the_environment_is_refused_too(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PDSERVE_RATE", "nan")
    assert run_command(flags) == EXIT_USAGE
    assert "--rate must be a number from 0.001 to 1000, got 'nan'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_simulated(
    flags: list[str], tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command([*flags, flag, str(tmp_path / "none" / "plan")]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"pdserve: {flag} ")
    assert "there is no folder" in told
    assert told.count("\n") == 1


def test_a_plan_and_its_page_cannot_be_one_file(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, again = tmp_path / "a", tmp_path / ".." / tmp_path.name / "a"
    assert run_command([*flags, "--output", str(path), "--plot", str(again)]) == EXIT_USAGE
    assert "--plot must differ from --output" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("times", [(7,), (7, 7, 7), (7, 7.1), (0, 1e14)])
def test_a_trace_without_a_rate_is_refused_before_anything_is_simulated(
    flags: list[str], tmp_path: Path, times: tuple[float, ...], capsys: pytest.CaptureFixture[str]
):
    rows = [
        {"timestamp": time, "input_length": 9, "output_length": 2, "hash_ids": [1]}
        for time in times
    ]
    path = tmp_path / "instant.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run_command([*flags, "--trace", str(path)]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert told.startswith("pdserve: --trace instant")
    assert told.count("\n") == 1


def test_a_rate_that_leaves_no_duration_is_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run_command([*flags, "--rate", "1000"]) == EXIT_USAGE
    assert "must come over at least 0.1 s, got 0.00298 s" in capsys.readouterr().err


def test_a_request_that_fits_no_whole_blocks_is_left_out(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # 920 tokens are eight simulated blocks of 128; the cache has room for seven and a half.
    path = tmp_path / "small.json"
    path.write_text(replace(PROFILE, kv_tokens=960).to_json(), encoding="utf-8")
    assert run_command([*flags, "--gpu", str(path)]) == EXIT_USAGE
    assert "no request of trace, 150 longer than 896 tokens left out" in capsys.readouterr().err


def test_a_profile_that_is_none_is_refused_by_its_file(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = str(tmp_path / "trace.jsonl")
    assert run_command([*flags, "--gpu", trace]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"pdserve: --gpu: profile {trace} is no JSON")
    assert "Extra data" not in told


def test_lengths_and_rates_can_be_scaled(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command([*flags, "--divide-lengths", "10", "--rate", "2"]) == 0
    assert "lengths / 10, rate x 2" in capsys.readouterr().err


def test_objectives_are_read_in_any_order():
    assert parse_slo("tpot=0.05, ttft=2") == Slo(ttft_s=2, tpot_s=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "ttft=2", "ttft=2,tpot=x", "ttft=0,tpot=1", "ttft=1,tpot=1,itl=1", "ttft=1,tpot=inf"],
)
def test_other_objectives_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"slo (ttft |tpot |)must"):
        parse_slo(text)


@pytest.mark.parametrize("value", ["nan", "1e400", "1e9", "-1", "x"])
def test_an_objective_out_of_range_is_refused_with_value_and_limits(value: str):
    with pytest.raises(ConfigError, match=f"--slo tpot .* 1e-06 to 86400, got '{value}'"):
        parse_slo(f"ttft=1,tpot={value}")


def test_an_objective_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="slo must name ttft once"):
        parse_slo("ttft=1,ttft=2,tpot=1")
