"""`pdserve profile` on the CPU, and what its file is good for."""

from pathlib import Path

import pytest

from launcher.cli import EXIT_USAGE, run_command
from pdserve.predictor.profile import profile_from_json
from simulation.profile_files import find_profile
from tests.support.tiny_models import make_tiny_llama

FLAGS = ["--kv-cache-memory", "4M", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]


def test_a_measured_profile_has_laws_that_a_plan_can_use(tmp_path: Path) -> None:
    folder, output = make_tiny_llama(tmp_path / "tiny"), tmp_path / "tiny.json"
    assert run_command(["profile", str(folder), "--output", str(output), *FLAGS]) == 0
    profile = profile_from_json(output.read_text(encoding="utf-8"))
    assert profile.prefill_s(64, 0) > 0
    assert profile.decode_step_s(4, 400) > 0
    assert profile.kv_tokens * profile.kv_bytes_per_token <= 4 * 2**20
    assert (profile.max_num_seqs, profile.max_num_batched_tokens) == (4, 64)
    assert profile.num_gpus == 0
    assert "not measured" in profile.detail["transfer"]
    assert find_profile(str(output), "tiny") == profile


def test_what_only_the_model_shows_to_be_too_small_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, output = make_tiny_llama(tmp_path / "tiny"), tmp_path / "tiny.json"
    argv = ["profile", str(folder), "--output", str(output), "--kv-cache-memory", "1"]
    assert run_command(argv) == EXIT_USAGE
    told = capfd.readouterr().err.splitlines()[-1]
    assert f"{folder} could not be measured: --kv-cache-memory must be at least" in told
    assert not output.exists()


def test_a_folder_that_is_no_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none.json"
    assert run_command(["profile", str(tmp_path), "--output", str(output)]) == EXIT_USAGE
    assert "config.json" in capsys.readouterr().err
    assert not output.exists()
