"""What is made of a sanitizer's words."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.sanitize import (
    Verdict,
    count_found,
    count_switches,
    find_switch_lines,
    inspect,
    report,
)
from benchmarks.kernels.sanitize_calls import attend
from pdserve.kernels.decode_attention import DecodeTuning
from tests.unit.kernels import conftest  # noqa: F401  mends the interpreter

CLEAN = Verdict(
    name="norm", tool="memcheck", has_ended=True, num_found=0, seconds=1.0, output="norm: done"
)
CAUGHT = replace(CLEAN, name="wrong", has_ended=False, num_found=2)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 3),
        ("========= Error: no device", None),
    ],
)
def test_the_number_in_a_tools_summary_is_read(output: str, found: int | None) -> None:
    assert count_found(output) == found


def test_all_is_well_only_if_all_ended_clean_and_the_wrong_program_was_caught() -> None:
    assert report([CLEAN], [CAUGHT])
    assert not report([CLEAN, replace(CLEAN, num_found=1)], [CAUGHT])
    assert not report([CLEAN, replace(CLEAN, has_ended=False)], [CAUGHT])
    assert not report([CLEAN, replace(CLEAN, num_found=None)], [CAUGHT])
    assert not report([CLEAN], [replace(CAUGHT, num_found=0)])


def fake_sanitizer(folder: Path, summary: str) -> str:
    tool = folder / "sanitizer"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        "program = sys.argv[sys.argv.index('python'):]\n"
        "subprocess.run([sys.executable, *program[1:]])\n"
        f"print({summary!r})\n"
    )
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize(("word", "is_clean"), [("norm: done", True), ("norm: half", False)])
def test_a_program_that_stops_half_way_is_not_clean(
    tmp_path: Path, word: str, is_clean: bool
) -> None:
    tool = fake_sanitizer(tmp_path, "========= ERROR SUMMARY: 0 errors")
    verdict = inspect(tool, "memcheck", "norm", ["python", "-c", f"print({word!r})"])
    assert verdict.num_found == 0
    assert verdict.is_clean is is_clean


def test_decode_attention_is_called_as_its_launchers_want_it() -> None:
    attend(16, torch.float32, (3, 0), tuning=DecodeTuning())
    attend(16, torch.float32, (17,), queries=2, window=9, soft_cap=20.0)


@pytest.mark.parametrize(("other", "num_switches"), [(None, 1), ("streamed_decode.py:140", 0)])
def test_only_races_at_the_switch_of_warps_are_counted_apart(
    other: str | None, num_switches: int
) -> None:
    first, second = sorted(find_switch_lines())
    output = (
        f"========= Error: Race reported between Read access at k+0x100 in {first}\n"
        f"=========     and Write access at k+0x4320 in {other or first} [40 hazards]\n"
        f"=========     and Write access at k+0xa5e0 in {second} [46 hazards]\n"
        "========= \n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    assert count_switches(output, find_switch_lines()) == num_switches
    verdict = replace(CLEAN, num_found=1, num_switches=num_switches)
    assert verdict.is_clean == (num_switches == 1)
