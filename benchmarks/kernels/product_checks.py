"""Correctness of the product kernels on the device, one kernel a process.

A kernel that never ends takes only its own process down: run it under a time limit.

    python -m benchmarks.kernels.product_checks streamed
"""

import sys

import torch
from torch import Tensor

from pdserve.kernels.product_plan import MAX_ROW_KERNEL_ROWS, KernelName, ProductPlan
from pdserve.kernels.small_product import small_product

# rows, outputs, inputs, splits
SIZES = (
    (1, 64, 64, 1),
    (3, 200, 520, 2),
    (8, 6144, 4096, 2),
    (17, 1000, 1024, 1),
    (64, 4096, 14336, 4),
    (100, 384, 2048, 3),
    (200, 512, 1000, 1),
    (256, 4096, 4096, 2),
    (128, 28672, 4096, 1),
    (300, 640, 1024, 1),
)
# block_n, block_k, num_stages, num_warps, programs_per_sm
STREAMED = (
    (64, 128, 8, 4, None),
    (64, 64, 4, 4, 1),
    (128, 64, 4, 8, None),
    (128, 128, 3, 4, 2),
    (256, 64, 4, 8, None),
)


# outputs of each half, inputs, stages and warps
GATED = ((64, 128, 3, 4, None), (64, 64, 9, 4, None), (64, 64, 4, 8, None), (128, 64, 4, 8, None))


def multiply_exactly(kernel: KernelName, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Returns the result in float64."""
    product = x_MK.double() @ weight_NK.double().T
    if kernel != "gated":
        return product
    gate, up = product.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def make_weight(
    kernel: KernelName, num_outputs: int, num_inputs: int, generator: torch.Generator
) -> Tensor:
    """Returns random weights of so many outputs; sums of a gated product stay near 1."""
    num_rows = num_outputs * (2 if kernel == "gated" else 1)
    weight = torch.randn(num_rows, num_inputs, device="cuda", generator=generator)
    return (weight / num_inputs**0.5 if kernel == "gated" else weight).bfloat16()


MAX_ERROR = 1e-5
MAX_ERRORS: dict[KernelName, float] = {"gated": 1e-4}
"""Relative; a gated product adds up 14336 inputs in one go, where others split them."""


def list_plans(kernel: KernelName, num_splits: int) -> list[ProductPlan]:
    """Returns plans of one kernel that differ in every field."""
    cuts: tuple[tuple[int, int, int, int, int | None], ...] = STREAMED
    if kernel == "gated":
        cuts, num_splits = GATED, 1
    elif kernel == "row":
        cuts = ((4, 256, 1, 4, None), (16, 128, 1, 8, None))
    elif kernel == "tiled":
        cuts = ((64, 128, 3, 4, None), (128, 64, 4, 8, None))
    return [
        ProductPlan(
            kernel=kernel,
            num_splits=num_splits,
            block_n=block_n,
            block_k=block_k,
            num_stages=num_stages,
            num_warps=num_warps,
            programs_per_sm=per_sm,
        )
        for block_n, block_k, num_stages, num_warps, per_sm in cuts
    ]


def check_values(kernel: KernelName) -> float:
    """Returns the largest relative error, over sizes, plans and both ways to launch."""
    worst = 0.0
    generator = torch.Generator("cuda").manual_seed(1)
    for num_rows, num_outputs, num_inputs, num_splits in SIZES:
        if kernel == "row" and num_rows > MAX_ROW_KERNEL_ROWS:
            continue
        x = torch.randn(num_rows, num_inputs, device="cuda", generator=generator).bfloat16()
        weight = make_weight(kernel, num_outputs, num_inputs, generator)
        expected = multiply_exactly(kernel, x, weight)
        for plan in list_plans(kernel, num_splits):
            if num_splits > -(-num_inputs // plan.block_k):
                continue
            for use_pdl in (False, True):
                shape = (plan.num_splits, num_rows, num_outputs)
                out = torch.full(shape, torch.nan, device="cuda")
                small_product(x, weight, out, plan, use_pdl=use_pdl)
                error = (out.double().sum(0) - expected).norm() / expected.norm()
                if not error.item() < MAX_ERRORS.get(kernel, MAX_ERROR):
                    print(f"WRONG {plan} {num_rows} rows, pdl {use_pdl}: {error.item():.2e}")
                worst = max(worst, error.nan_to_num(9.0).item())
    return worst


def check_rows_alone(kernel: KernelName) -> bool:
    """Returns True if a row has equal bits in every batch and, streamed, in every tile."""
    generator = torch.Generator("cuda").manual_seed(2)
    max_rows = MAX_ROW_KERNEL_ROWS if kernel == "row" else 300
    x = torch.randn(max_rows, 4096, device="cuda", generator=generator).bfloat16()
    weight = make_weight(kernel, 768, 4096, generator)
    is_equal = True
    reference: torch.Tensor | None = None
    for plan in list_plans(kernel, 2):
        if kernel in ("row", "tiled"):
            reference = None
        for num_rows in (max_rows, 1, 3, 8, 17, 64, 200):
            if num_rows > max_rows:
                continue
            out = torch.empty(plan.num_splits, num_rows, 768, device="cuda")
            small_product(x[:num_rows], weight, out, plan)
            if reference is None:
                reference = out
            if not torch.equal(out, reference[:, :num_rows]):
                is_equal = False
                print(f"UNEQUAL bits {plan} at {num_rows} rows")
    return is_equal


def check_cut_tiles(kernel: KernelName) -> bool:
    """Returns True if rows in a larger buffer of NaN have the bits of rows that end with theirs."""
    generator = torch.Generator("cuda").manual_seed(3)
    weight = make_weight(kernel, 640, 4096, generator)
    is_equal = True
    for num_rows in (5, 70, 100, 200):
        if kernel == "row" and num_rows > MAX_ROW_KERNEL_ROWS:
            continue
        buffer = torch.full((512, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
        rows = buffer[:num_rows]
        rows.copy_(torch.randn(num_rows, 4096, device="cuda", generator=generator))
        for plan in list_plans(kernel, 2):
            shape = (plan.num_splits, num_rows, 640)
            outs = [torch.empty(shape, device="cuda") for _ in range(2)]
            small_product(rows, weight, outs[0], plan)
            small_product(rows.clone(), weight, outs[1], plan)
            if not torch.equal(*outs):
                is_equal = False
                print(f"UNEQUAL bits {plan} at {num_rows} rows in a larger buffer")
    return is_equal


def main() -> None:
    """Checks the kernel named on the command line; exits with 1 if it is wrong."""
    kernel: KernelName = sys.argv[1]  # type: ignore[assignment]
    worst = check_values(kernel)
    is_equal = check_rows_alone(kernel)
    is_cut = check_cut_tiles(kernel)
    print(f"{kernel}: relative error {worst:.1e}, rows alone {is_equal}, cut tiles {is_cut}")
    sys.exit(0 if worst < MAX_ERRORS.get(kernel, MAX_ERROR) and is_cut else 1)


if __name__ == "__main__":
    main()
