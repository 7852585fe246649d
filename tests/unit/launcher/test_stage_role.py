"""`pdserve stage` up to the point where a face is needed."""

import sys
from pathlib import Path

import pytest

from launcher.roles.entry import run_stage
from pdserve.config.stage import StageConfig
from pdserve.stage.main import hold_stage
from tests.support.models import tiny_llama_folder  # noqa: F401

FLAGS = ("--worker-id", "decode-0", "--stage", "1", "--redis", "redis://127.0.0.1:1/0")


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, list[StageConfig]]:
    found: list[StageConfig] = []

    def take(config: StageConfig) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(sys, "argv", ["stage", *FLAGS, *flags])
    return run_stage(take), found


def test_a_stage_is_named_by_its_worker_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_STAGE_TOKEN", "a token of this test")
    status, (config,) = run(monkeypatch, "--host", "10.0.0.2")
    assert status == 0
    assert (config.worker_id, config.stage, config.host) == ("decode-0", 1, "10.0.0.2")
    assert config.stage_token == "a token of this test"
    assert config.model is None


def test_a_model_of_this_node_is_looked_up_here(
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    _, (config,) = run(monkeypatch, "--model", str(tiny_llama_folder))
    assert config.model == str(tiny_llama_folder)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--stage", "0"), "--stage must be at least 1, got 0"),
        (("--model", "no-such-model"), "no model no-such-model"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    flags: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = run(monkeypatch, *flags)
    assert (status, found) == (2, [])
    assert text in capsys.readouterr().err


def test_a_stage_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PDSERVE_STAGE_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", ["stage", *FLAGS])
    assert run_stage(hold_stage) == 2
    assert "--stage-token must have at least 16 characters" in capsys.readouterr().err


def test_a_host_that_is_not_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_STAGE_TOKEN", "a token of this test")
    monkeypatch.setattr(sys, "argv", ["stage", *FLAGS, "--host", "192.0.2.1"])
    assert run_stage(hold_stage) == 2
    assert "cannot listen on 192.0.2.1:0" in capsys.readouterr().err
