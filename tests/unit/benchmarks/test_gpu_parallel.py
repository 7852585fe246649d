"""Rows of an earlier run that stay in the file of a run of some parts."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_parallel import mark_rows, rows_of_others


@pytest.mark.parametrize(
    ("parts", "kept"),
    [(["tp"], ["one", "pp"]), (["pp"], ["tp"]), (["one", "pp"], ["tp"]), (["tp", "one"], [])],
)
def test_parts_that_are_not_measured_keep_their_rows(
    tmp_path: Path, parts: list[str], kept: list[str]
) -> None:
    path = tmp_path / "gpu_parallel.json"
    rows = [row for part in ("tp", "one", "pp") for row in mark_rows([{"bench": part}], part)]
    path.write_text(json.dumps({"rows": rows}))
    assert [row["part"] for row in rows_of_others(path, parts)] == kept


def test_a_first_run_keeps_nothing(tmp_path: Path) -> None:
    assert rows_of_others(tmp_path / "gpu_parallel.json", ["tp"]) == []
