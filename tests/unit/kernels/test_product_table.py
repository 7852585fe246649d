import json
from collections.abc import Callable, Iterable

import pytest

from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import (
    ROW_BUCKETS,
    Choice,
    LayerShape,
    ProductTable,
    find_bucket,
    measure_table,
)

QKV = LayerShape(num_outputs=6144, num_inputs=4096)
DOWN = LayerShape(num_outputs=4096, num_inputs=14336)


def make_plan(num_splits: int) -> ProductPlan:
    return ProductPlan(
        kernel="streamed",
        num_splits=num_splits,
        block_n=64,
        block_k=128,
        num_stages=8,
        num_warps=4,
    )


def list_plans(shape: LayerShape, num_rows: int) -> Iterable[ProductPlan]:
    return (make_plan(1), make_plan(2))


def make_timer(
    us: Callable[[LayerShape, int, int | None], float],
) -> Callable[[LayerShape, int, ProductPlan | None], float]:
    return lambda shape, num_rows, plan: us(shape, num_rows, plan and plan.num_splits)


def test_each_bucket_gets_the_quickest_plan() -> None:
    def us(shape: LayerShape, num_rows: int, num_splits: int | None) -> float:
        if num_splits is None:
            return 20.0
        return 12.0 + num_rows * num_splits / 16 + 8 / num_splits

    table = measure_table("h", [QKV], list_plans, make_timer(us))
    assert table.choose(QKV, 1) == make_plan(2)
    assert table.choose(QKV, 64) is None
    assert table.choices[QKV][1].us == 12.0 + 2 / 16 + 4
    assert table.choices[QKV][64] == Choice(plan=None, us=20.0, torch_us=20.0)


def test_of_equal_times_torch_is_chosen() -> None:
    table = measure_table("h", [QKV], list_plans, make_timer(lambda *_: 5.0))
    assert all(table.choose(QKV, num_rows) is None for num_rows in ROW_BUCKETS)


def test_torch_must_be_quicker_by_the_margin() -> None:
    def choose(torch_us: float) -> ProductPlan | None:
        timer = make_timer(lambda shape, rows, splits: torch_us if splits is None else 10.0)
        table = measure_table("h", [QKV], list_plans, timer, torch_margin=0.03)
        return table.choose(QKV, 1)

    assert choose(9.8) == make_plan(1)
    assert choose(9.6) is None


def test_without_a_plan_torch_is_chosen() -> None:
    table = measure_table("h", [QKV], lambda *_: (), make_timer(lambda *_: 5.0))
    assert table.choices[QKV][8] == Choice(plan=None, us=5.0, torch_us=5.0)


def test_shapes_are_chosen_for_apart() -> None:
    def us(shape: LayerShape, num_rows: int, num_splits: int | None) -> float:
        return 1.0 if num_splits == (1 if shape == QKV else 2) else 2.0

    table = measure_table("h", [QKV, DOWN], list_plans, make_timer(us))
    assert table.choose(QKV, 8) == make_plan(1)
    assert table.choose(DOWN, 8) == make_plan(2)


def test_buckets_between_the_measured_ones_take_the_next_larger_choice() -> None:
    timed: set[int] = set()

    def us(shape: LayerShape, num_rows: int, num_splits: int | None) -> float:
        timed.add(num_rows)
        return 1.0 if num_splits == (1 if num_rows <= 8 else 2) else 2.0

    table = measure_table("h", [QKV], list_plans, make_timer(us), buckets=(8, 256))
    assert timed == {8, 256}
    assert table.choose(QKV, 2) == make_plan(1)
    assert table.choose(QKV, 9) == make_plan(2)
    assert table.covers("h", [QKV])


def test_buckets_that_leave_large_batches_out_are_refused() -> None:
    with pytest.raises(ValueError, match="must end with 256"):
        measure_table("h", [QKV], list_plans, make_timer(lambda *_: 5.0), buckets=(1, 64))


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (3, 4), (64, 64), (65, 128), (256, 256)])
def test_rows_fall_into_the_smallest_bucket_that_holds_them(num_rows: int, bucket: int) -> None:
    assert find_bucket(num_rows) == bucket


def make_table() -> ProductTable:
    return measure_table(
        "NVIDIA H200 bf16",
        [QKV, DOWN],
        list_plans,
        make_timer(lambda shape, rows, splits: 3.0 if splits is None else rows / splits),
    )


def test_more_rows_than_the_largest_bucket_and_unknown_shapes_go_to_torch() -> None:
    table = make_table()
    assert table.choose(QKV, 1) is not None
    assert table.choose(QKV, 257) is None
    assert table.choose(LayerShape(num_outputs=1, num_inputs=1), 1) is None


def test_a_table_survives_json() -> None:
    table = make_table()
    assert ProductTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_a_fixed_plan_serves_every_number_of_rows_and_survives_json() -> None:
    table = ProductTable(device="h", choices={}, fixed={QKV: make_plan(2)})
    assert {table.choose(QKV, num_rows) for num_rows in (1, 64, 5000)} == {make_plan(2)}
    assert ProductTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_a_shape_without_a_fixed_plan_is_an_error_in_deterministic_mode() -> None:
    table = ProductTable(device="h", choices={}, fixed={QKV: make_plan(2)})
    with pytest.raises(KeyError):
        table.choose(DOWN, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "format 0, expected 2"),
        ({"layers": [{"num_outputs": 1}]}, "not a product table"),
        ({"layers": 3}, "not a product table"),
    ],
)
def test_foreign_json_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProductTable.from_json({**make_table().to_json(), **change})


def test_a_table_holds_for_its_own_device_and_shapes_only() -> None:
    table = make_table()
    assert table.covers("NVIDIA H200 bf16", [DOWN])
    assert not table.covers("NVIDIA H100 bf16", [DOWN])
    assert not table.covers("NVIDIA H200 bf16", [LayerShape(num_outputs=1, num_inputs=1)])


def test_a_table_prints_one_line_a_bucket() -> None:
    text = make_table().describe()
    assert "6144 x 4096" in text
    assert "   1 rows    0.5 (   3.0) streamed 64x128x8 w4 S2" in text
    assert "  64 rows    3.0 (   3.0) torch" in text
