"""`pdserve profile` up to the point where a model is looked for."""

from pathlib import Path

import pytest

from launcher.cli import EXIT_USAGE, run_command
from launcher.commands import profile


def refuse_to_resolve(model: str, *, needs_weights: bool) -> Path:
    raise AssertionError("a model is looked for before all flags are checked")


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--link-bytes-per-s", "-1", "a number from 1000 to 1e+14, got '-1'"),
        ("--link-bytes-per-s", "0", "a number from 1000 to 1e+14, got '0'"),
        ("--link-bytes-per-s", "nan", "a number from 1000 to 1e+14, got 'nan'"),
        ("--link-bytes-per-s", "inf", "a number from 1000 to 1e+14, got 'inf'"),
        ("--max-num-seqs", "0", "a whole number from 1 to 1048576, got '0'"),
        ("--max-num-batched-tokens", "0", "a whole number from 1 to 1048576, got '0'"),
        ("--block-size", "-1", "a whole number from 1 to 128, got '-1'"),
        ("--block-size", "24", "a power of two from 1 to 128, got 24"),
        ("--kv-cache-memory", "abc", "a size such as 512M or 2G, got 'abc'"),
        ("--kv-cache-memory", "9" * 400, "a size such as 512M or 2G, below 2^63 bytes, got"),
        ("--kv-cache-memory", "0", "at least 1, got 0"),
        ("--output", "/proc", "a file, got the folder /proc"),
    ],
)
def test_a_flag_out_of_range_is_refused_before_a_model_is_looked_for(
    flag: str,
    value: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(profile, "resolve_model", refuse_to_resolve)
    output = tmp_path / "profile.json"
    assert run_command(["profile", "x", "--output", str(output), flag, value]) == EXIT_USAGE
    written = capsys.readouterr().err
    assert written.startswith(f"pdserve: {flag} must be {told}")
    assert written.count("\n") == 1
    assert not output.exists()
