"""Starts as an engine does with its products: a process of its own for `test_product_cache`.

Chooses among all plans, then computes with each of them; prints the table as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from pdserve.kernels import product_timer
from pdserve.kernels.gluon_version import has_known_gluon
from pdserve.kernels.product_choices import ProductDevice
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import LayerShape
from pdserve.kernels.small_product import small_product

SHAPES = (
    LayerShape(num_outputs=320, num_inputs=512),
    LayerShape(num_outputs=656, num_inputs=512, is_gated=True),
    LayerShape(num_outputs=1000, num_inputs=512),
)
NUM_ROWS = (1, 8, 70, 250)


def refuse(*arguments: object, **settings: object) -> None:
    raise AssertionError("timed again")


def check(weight: Tensor, num_rows: int, plan: ProductPlan, *, use_pdl: bool) -> None:
    x = torch.randn(num_rows, weight.shape[1], device="cuda").to(weight.dtype)
    expected = x.double() @ weight.double().T
    if plan.kernel == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * gate.sigmoid() * up
    out = torch.full((plan.num_splits, *expected.shape), torch.nan, device="cuda")
    small_product(x, weight, out, plan, use_pdl=use_pdl)
    error = (out.double().sum(0) - expected).norm() / expected.norm()
    assert error < 1e-4, f"{plan} of {num_rows} rows: {error}"


def main() -> None:
    folder, must_measure = Path(sys.argv[1]), sys.argv[2] == "measure"
    torch.manual_seed(0)
    weights = {
        shape: [torch.randn(shape.num_outputs, shape.num_inputs, device="cuda").bfloat16()]
        for shape in SHAPES
    }
    properties = torch.cuda.get_device_properties(0)
    use_pdl = properties.major >= 9
    if not must_measure:
        product_timer.ProductTimer = refuse  # type: ignore[assignment,misc]  # must not be made
    table = product_timer.make_product_table(
        weights, head=SHAPES[-1], use_pdl=use_pdl, cache=folder, is_deterministic=False
    )
    device = ProductDevice(
        num_sms=properties.multi_processor_count,
        has_streamed=properties.major == 9 and has_known_gluon(),
    )
    for shape, (weight,) in weights.items():
        for num_rows in NUM_ROWS:
            for plan in device.list_plans(shape, num_rows):
                check(weight, num_rows, plan, use_pdl=use_pdl)
    print(json.dumps(table.to_json()))


if __name__ == "__main__":
    main()
