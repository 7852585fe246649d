import json

import pytest

from pdserve.kernels.product_plan import ProductPlan, pad_rows

FIELDS = {
    "kernel": "streamed",
    "num_splits": 2,
    "block_n": 64,
    "block_k": 128,
    "num_stages": 8,
    "num_warps": 4,
    "programs_per_sm": None,
}


def test_a_plan_survives_json() -> None:
    plan = ProductPlan.from_json(FIELDS)
    assert ProductPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.to_json() == FIELDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "cublas"}, "kernel must be one of"),
        ({"block_n": 96}, "block_n must be a power of two, got 96"),
        ({"block_k": 0}, "block_k must be a power of two, got 0"),
        ({"num_warps": 3}, "num_warps must be a power of two, got 3"),
        ({"num_splits": 0}, "at least 1, got 0 and 8"),
        ({"num_stages": 0}, "at least 1, got 2 and 0"),
        ({"programs_per_sm": 0}, "programs_per_sm must be at least 1"),
        ({"num_warps": 8}, "16 outputs a warp, got 8 warps for block_n 64"),
        ({"num_warps": 2}, "4 or 8 warps"),
        ({"kernel": "gated"}, "one split and a program a tile"),
        ({"kernel": "gated", "num_splits": 1, "block_n": 32}, "64 outputs a tile"),
        ({"kernel": "gated", "num_splits": 1, "num_warps": 2}, "a gated plan needs 4 or 8 warps"),
        ({"kernel": "gated", "num_splits": 1, "programs_per_sm": 1}, "a program a tile"),
        ({"colour": 1}, "not a product plan"),
    ],
)
def test_a_plan_out_of_range_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProductPlan.from_json({**FIELDS, **change})


def test_a_plan_with_a_missing_field_is_refused() -> None:
    with pytest.raises(ValueError, match="num_splits"):
        ProductPlan.from_json({name: FIELDS[name] for name in FIELDS if name != "num_splits"})


def test_a_plan_names_itself_briefly() -> None:
    plan = ProductPlan.from_json({**FIELDS, "programs_per_sm": 2})
    assert plan.describe() == "streamed 64x128x8 w4 S2 p2"


@pytest.mark.parametrize(
    ("num_rows", "padded"), [(1, 8), (8, 8), (9, 16), (65, 128), (256, 256), (300, 256)]
)
def test_rows_are_padded_to_a_power_of_two_within_bounds(num_rows: int, padded: int) -> None:
    assert pad_rows(num_rows, 8, 256) == padded
