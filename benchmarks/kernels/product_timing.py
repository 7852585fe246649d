"""Times products on the device: alone over rotating weights, and in the chain of a decode step."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.kernels.product_candidates import Shape
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_timer import time_graph
from pdserve.kernels.small_product import small_product

Plan = ProductPlan | None
"""None is torch.mm."""

# Standard deviations of a layer's outputs for weights of 0.02 and inputs of 1; kept near 1.
WEIGHT_SCALE = 0.02


def multiply(
    x: Tensor,
    weight: Tensor,
    out_SMN: Tensor,
    plan: Plan,
    use_pdl: bool,
) -> None:
    """Launches one product."""
    if plan is None:
        torch.mm(x, weight.T, out=out_SMN[0])
    else:
        small_product(x, weight, out_SMN, plan, use_pdl=use_pdl)


def make_out(num_rows: int, shape: Shape, plan: Plan) -> Tensor:
    """Returns room for a plan's result, as the next kernel would read it."""
    if plan is None or plan.num_splits == 1:
        return torch.empty(1, num_rows, shape.num_outputs, device="cuda", dtype=torch.bfloat16)
    return torch.empty(plan.num_splits, num_rows, shape.num_outputs, device="cuda")


def time_product(
    num_rows: int, shape: Shape, weights: list[Tensor], plan: Plan, *, use_pdl: bool
) -> float:
    """Returns microseconds of a product, the mean over a row of launches on all `weights`."""
    x = torch.randn(num_rows, shape.num_inputs, device="cuda").bfloat16()
    out = make_out(num_rows, shape, plan)

    def launch() -> None:
        for weight in weights:
            multiply(x, weight, out, plan, use_pdl)

    return 1000 * time_graph(launch) / len(weights)


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def _fold_kernel(
    in_ptr,
    out_ptr,
    num_splits,
    num_rows,
    num_inputs,
    num_outputs,
    scale,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_outputs
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        line = (split * num_rows + row).to(tl.int64) * num_inputs
        acc += tl.load(in_ptr + line + columns, mask=mask, other=0.0).to(tl.float32)
    out = (acc * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * num_outputs + columns, out, mask=mask)


def fold(partials_SMN: Tensor, out: Tensor, scale: float, use_pdl: bool) -> None:
    """Stands for the small kernel between two products: sums partials, writes the next rows."""
    num_splits, num_rows, num_inputs = partials_SMN.shape
    num_outputs = out.shape[1]
    _fold_kernel[(num_rows, triton.cdiv(num_outputs, 1024))](
        partials_SMN,
        out,
        num_splits,
        num_rows,
        num_inputs,
        num_outputs,
        scale,
        BLOCK=1024,
        USE_PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The products of all layers with a small kernel before each, as one CUDA graph."""

    shapes: tuple[Shape, ...]
    weights: dict[str, list[Tensor]]

    def time(self, num_rows: int, plans: dict[str, Plan], *, use_pdl: bool) -> float:
        """Returns milliseconds of the chain."""
        outs = {shape.name: make_out(num_rows, shape, plans[shape.name]) for shape in self.shapes}
        rows = {
            shape.name: torch.randn(num_rows, shape.num_inputs, device="cuda").bfloat16()
            for shape in self.shapes
        }
        for out in outs.values():
            out.normal_()

        products = [
            (shape, self.weights[shape.name][layer])
            for layer in range(len(self.weights[self.shapes[0].name]))
            for shape in self.shapes
        ]

        def launch() -> None:
            previous = self.shapes[-1]
            for shape, weight in products:
                scale = 1 / (WEIGHT_SCALE * previous.num_inputs**0.5)
                fold(outs[previous.name], rows[shape.name], scale, use_pdl)
                multiply(rows[shape.name], weight, outs[shape.name], plans[shape.name], use_pdl)
                previous = shape

        milliseconds = time_graph(launch)
        for name, out in outs.items():
            if not out.isfinite().all().item():
                raise RuntimeError(f"{name} is not finite after the chain")
        return milliseconds
