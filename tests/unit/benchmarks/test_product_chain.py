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


def test_a_new_layer_gets_what_was_measured_and_fewer_rows_than_that(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    known = load_defaults().to_json()
    whole_layers = [layer for layer in known["layers"] if layer["num_outputs"] == 6144]
    path.write_text(json.dumps({**known, "layers": whole_layers}))
    update_defaults(path, SHAPES, [found(64, 64), found(8, 64)])
    table = ProductTable.from_json(json.loads(path.read_text()))
    half = table.choices[LayerShape(num_outputs=4096, num_inputs=7168)]
    assert half.keys() == {1, 2, 4, 8, 64}
    assert half[1] == half[8]
    whole = LayerShape(num_outputs=6144, num_inputs=4096)
    assert table.choices[whole] == load_defaults().choices[whole]


def test_rows_without_a_default_plan_have_several_to_be_timed() -> None:
    device = ProductDevice(num_sms=132, has_streamed=True)
    half = LayerShape(num_outputs=4096, num_inputs=7168)
    assert len(list(device.list_plans(half, 8))) == 1
    assert len(list(device.list_plans(half, 32))) > 1
