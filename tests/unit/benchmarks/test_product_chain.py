"""The default table of products, updated from a tuning run."""

import json
from pathlib import Path

from benchmarks.kernels.product_candidates import describe, share_shapes
from benchmarks.kernels.product_chain import update_defaults
from pdserve.kernels.product_choices import ProductDevice, load_defaults
from pdserve.kernels.product_table import LayerShape, ProductTable

SHAPES = share_shapes(2)


def found(rows: int, block_n: int) -> dict[str, object]:
    """What a tuning run says of one number of rows."""
    shape = LayerShape(num_outputs=block_n * 132, num_inputs=4096)
    plan = next(iter(ProductDevice(num_sms=132, has_streamed=True).list_plans(shape, rows)))
    names = [shape.name for shape in SHAPES]
    times = [[9.0, describe(plan)], [10.0, "torch"]]
    return {
        "rows": rows,
        "plans": dict.fromkeys(names, plan.to_json()),
        "us": dict.fromkeys(names, times),
    }


def test_rows_that_were_not_measured_take_the_plan_of_the_next_larger(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(load_defaults().to_json()))
    update_defaults(path, SHAPES, [found(256, 64), found(8, 64)])
    table = ProductTable.from_json(json.loads(path.read_text()))
    half = LayerShape(num_outputs=4096, num_inputs=7168)
    assert table.choices[half][64] == table.choices[half][256]
    assert table.choices[half][1] == table.choices[half][8]
    assert table.choices[half][8] != table.choices[half][16]
    whole = LayerShape(num_outputs=6144, num_inputs=4096)
    assert table.choices[whole] == load_defaults().choices[whole]


def test_a_new_layer_without_the_most_rows_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(load_defaults().to_json()))
    update_defaults(path, SHAPES, [found(8, 64)])
    table = ProductTable.from_json(json.loads(path.read_text()))
    assert LayerShape(num_outputs=4096, num_inputs=7168) not in table.choices
