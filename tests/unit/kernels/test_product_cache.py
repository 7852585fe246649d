"""Tables of earlier starts: read if they fit, told of if they do not, never in the way."""

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.kernels.product_cache import kernel_version, read_table, table_path, write_table
from pdserve.kernels.product_table import LayerShape, ProductTable, measure_table

QKV = LayerShape(num_outputs=6144, num_inputs=4096)
DOWN = LayerShape(num_outputs=4096, num_inputs=14336)
SHAPES = (QKV, DOWN)
DEVICE = "H200, bfloat16, torch 2"


def make_table(us: float = 5.0) -> ProductTable:
    return measure_table(DEVICE, SHAPES, lambda shape, rows: (), lambda *_: us)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_table_is_read_as_it_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(tmp_path / "new" / "folder", DEVICE, SHAPES)
    assert read_table(path, DEVICE, SHAPES) is None
    write_table(path, make_table())
    assert read_table(path, DEVICE, SHAPES) == make_table()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert warnings(caplog) == []


def test_other_devices_shapes_and_versions_have_other_files(tmp_path: Path) -> None:
    paths = [
        table_path(tmp_path, device, shapes)
        for device in (DEVICE, "A100, bfloat16, torch 2")
        for shapes in (SHAPES, (QKV,))
    ]
    assert len(set(paths)) == 4
    assert table_path(tmp_path, DEVICE, (DOWN, QKV)) == paths[0]


def test_kernels_have_a_version_of_their_own() -> None:
    assert kernel_version() == kernel_version()
    assert len(kernel_version()) == 12


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "null", '{"format": 1}', '{"format": 99, "layers": []}', "\xff"],
)
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = table_path(tmp_path, DEVICE, SHAPES)
    path.write_bytes(content.encode("latin-1"))
    assert read_table(path, DEVICE, SHAPES) is None
    assert warnings(caplog) == ["product table ignored: not readable"]
    write_table(path, make_table())
    assert read_table(path, DEVICE, SHAPES) == make_table()


def test_a_file_with_one_field_of_a_wrong_kind_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(tmp_path, DEVICE, SHAPES)
    for field, value in (("rows", [1]), ("rows", {"1": 3}), ("fixed", 3), ("num_inputs", None)):
        data = make_table().to_json()
        data["layers"][0][field] = value
        path.write_text(json.dumps(data))
        caplog.clear()
        assert read_table(path, DEVICE, SHAPES) is None, (field, value)
        assert len(warnings(caplog)) == 1, (field, value)


def test_a_foreign_file_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(tmp_path, DEVICE, SHAPES)
    write_table(path, replace(make_table(), device="another"))
    assert read_table(path, DEVICE, SHAPES) is None
    assert warnings(caplog) == ["product table ignored: made for something else"]


def test_a_folder_that_takes_nothing_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    write_table(tmp_path / "file" / "table.json", make_table())
    assert warnings(caplog) == ["product table not kept"]


def test_a_write_that_fails_leaves_the_old_table_and_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(tmp_path, DEVICE, SHAPES)
    path.mkdir()
    write_table(path, make_table())
    assert warnings(caplog) == ["product table not kept"]
    assert list(tmp_path.iterdir()) == [path]


def test_readers_beside_writers_see_whole_tables_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(tmp_path, DEVICE, SHAPES)
    write_table(path, make_table())
    writers = [
        threading.Thread(
            target=lambda us=us: [write_table(path, make_table(us)) for _ in range(20)]
        )
        for us in (1.0, 2.0)
    ]
    for writer in writers:
        writer.start()
    for _ in range(40):
        assert read_table(path, DEVICE, SHAPES) is not None
    for writer in writers:
        writer.join()
    assert warnings(caplog) == []
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
