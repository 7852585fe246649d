"""Later starts on the same device: nothing is measured twice, and what is on disk fits."""

import json
import os
import subprocess
import sys
from pathlib import Path


def start(folder: Path, *, must_measure: bool) -> dict[str, object]:
    """Starts as an engine does, with kernels and tables of earlier starts; returns its table."""
    word = "measure" if must_measure else "read"
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.product_start", str(folder / "tables"), word],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder / "kernels")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    table: dict[str, object] = json.loads(found.stdout)
    return table


def test_a_second_process_measures_nothing_and_computes_with_every_kernel(tmp_path: Path) -> None:
    measured = start(tmp_path, must_measure=True)
    assert len(list((tmp_path / "tables").iterdir())) == 1
    assert start(tmp_path, must_measure=False) == measured
    # Without a table all kernels are compiled side by side, this time in no time.
    for file in (tmp_path / "tables").iterdir():
        file.unlink()
    start(tmp_path, must_measure=True)
