import pytest
import torch

from pdserve.kernels.product_plan import KernelName, ProductPlan
from pdserve.kernels.small_product import compile_product, small_product


def make_plan(kernel: KernelName, num_splits: int, block_k: int = 32) -> ProductPlan:
    return ProductPlan(
        kernel=kernel,
        num_splits=num_splits,
        block_n=16,
        block_k=block_k,
        num_stages=2,
        num_warps=4,
    )


def multiply(x: torch.Tensor, weight: torch.Tensor, plan: ProductPlan) -> torch.Tensor:
    out = torch.full((plan.num_splits, x.shape[0], weight.shape[0]), torch.nan)
    small_product(x, weight, out, plan)
    return out


def make_operands(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + num_outputs + num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    return x, torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("kernel", "num_rows", "num_outputs", "num_inputs", "num_splits"),
    [
        ("row", 1, 33, 70, 1),
        ("row", 3, 17, 200, 2),
        ("row", 8, 5, 96, 3),
        ("tiled", 1, 33, 70, 1),
        ("tiled", 7, 65, 200, 2),
        ("tiled", 19, 20, 96, 3),
        ("tiled", 150, 16, 33, 2),
    ],
)
def test_partial_sums_add_up_to_the_product(
    kernel: KernelName,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    num_splits: int,
    dtype: torch.dtype,
) -> None:
    x, weight = make_operands(num_rows, num_outputs, num_inputs, dtype)
    out = multiply(x, weight, make_plan(kernel, num_splits))
    expected = x.double() @ weight.double().T
    assert (out.double().sum(0) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("kernel", ["row", "tiled"])
def test_what_is_only_compiled_computes_nothing(kernel: KernelName) -> None:
    x, weight = make_operands(2, 16, 64)
    out = torch.full((1, 2, 16), torch.nan)
    compile_product(x, weight, out, make_plan(kernel, 1))
    assert bool(out.isnan().all())
    small_product(x, weight, out, make_plan(kernel, 1))
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("kernel", ["row", "tiled"])
def test_each_partial_sum_covers_its_own_part_of_the_inputs(kernel: KernelName) -> None:
    x, weight = make_operands(2, 16, 96)
    out = multiply(x, weight, make_plan(kernel, 3))
    for split in range(3):
        part = slice(32 * split, 32 * split + 32)
        torch.testing.assert_close(out[split], x[:, part] @ weight[:, part].T)


@pytest.mark.parametrize(("kernel", "max_rows"), [("row", 8), ("tiled", 40)])
def test_a_row_has_equal_bits_in_every_batch(kernel: KernelName, max_rows: int) -> None:
    x, weight = make_operands(max_rows, 40, 130)
    plan = make_plan(kernel, 2)
    whole = multiply(x, weight, plan)
    for num_rows in (1, 2, max_rows // 2):
        assert torch.equal(multiply(x[:num_rows].clone(), weight, plan), whole[:, :num_rows])


def test_rows_and_weights_may_lie_apart_in_memory() -> None:
    x, weight = make_operands(3, 20, 128)
    out = multiply(x[:, :64], weight[:, :64], make_plan("tiled", 1))
    torch.testing.assert_close(out[0], x[:, :64] @ weight[:, :64].T)


def test_one_split_may_be_written_in_the_dtype_of_the_model() -> None:
    x, weight = make_operands(3, 20, 64, torch.float16)
    out = torch.empty(1, 3, 20, dtype=torch.float16)
    small_product(x, weight, out, make_plan("tiled", 1))
    torch.testing.assert_close(out[0], (x.float() @ weight.float().T).half())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(20, 63)}, "63 inputs"),
        ({"weight": torch.zeros(20, 64).half()}, "float16"),
        ({"weight": torch.zeros(64, 20).T}, "contiguous along their inputs"),
        ({"out": torch.zeros(1, 3, 20)}, "out must be contiguous"),
        ({"out": torch.zeros(2, 3, 20).half()}, "partial sums must be float32"),
        ({"plan": make_plan("tiled", 2, block_k=64)}, "2 splits need as many blocks of 64"),
    ],
)
def test_operands_that_do_not_go_together_are_refused(
    change: dict[str, object], message: str
) -> None:
    operands = {
        "x": torch.zeros(3, 64),
        "weight": torch.zeros(20, 64),
        "out": torch.zeros(2, 3, 20),
        "plan": make_plan("tiled", 2),
    }
    operands |= change
    with pytest.raises(ValueError, match=message):
        small_product(*operands.values())


def test_the_row_kernel_refuses_more_rows_than_it_takes() -> None:
    with pytest.raises(ValueError, match="the row kernel takes 8 rows, got 9"):
        multiply(torch.zeros(9, 64), torch.zeros(16, 64), make_plan("row", 1))


STREAMED = ProductPlan(
    kernel="streamed", num_splits=1, block_n=64, block_k=64, num_stages=4, num_warps=4
)


def test_the_streamed_kernel_refuses_rows_that_the_copy_engine_cannot_address() -> None:
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        multiply(torch.zeros(2, 68).half(), torch.zeros(64, 68).half(), STREAMED)


def test_the_streamed_kernel_refuses_floats_of_32_bits() -> None:
    with pytest.raises(ValueError, match="16-bit"):
        multiply(torch.zeros(2, 64), torch.zeros(64, 64), STREAMED)


GATED = ProductPlan(kernel="gated", num_splits=1, block_n=64, block_k=64, num_stages=3, num_warps=4)


@pytest.mark.parametrize(
    ("num_weights", "num_outputs", "message"),
    [(129, 64, "two halves, got 129"), (128, 128, r"out must be contiguous \(1, 2, 64\)")],
)
def test_a_gated_product_needs_a_weight_of_two_halves_and_room_for_one(
    num_weights: int, num_outputs: int, message: str
) -> None:
    x, weight = torch.zeros(2, 64).half(), torch.zeros(num_weights, 64).half()
    with pytest.raises(ValueError, match=message):
        small_product(x, weight, torch.zeros(1, 2, num_outputs), GATED)
