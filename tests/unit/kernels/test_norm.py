import pytest
import torch

from pdserve.kernels.norm import add_norm

EPSILON = 1e-5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + EPSILON).rsqrt() * weight.double()


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("num_columns", [1, 64, 577])
@pytest.mark.parametrize("num_splits", [1, 5])
def test_partial_sums_are_added_to_the_residual_and_normed(
    num_rows: int, num_columns: int, num_splits: int
) -> None:
    x = randn(num_splits, num_rows, num_columns, seed=1)
    residual, weight = randn(num_rows, num_columns, seed=2), randn(num_columns, seed=3)
    total = residual.double() + x.double().sum(0)
    out = torch.full_like(residual, torch.nan)
    add_norm(x, residual, weight, out, epsilon=EPSILON)
    torch.testing.assert_close(residual, total.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out, normed(total, weight).float(), atol=1e-5, rtol=1e-5)


def test_nothing_to_add_leaves_the_residual_as_it_is() -> None:
    residual, weight = randn(5, 96, seed=2), randn(96, seed=3)
    before, out = residual.clone(), torch.full((5, 96), torch.nan)
    add_norm(None, residual, weight, out, epsilon=EPSILON)
    assert torch.equal(residual, before)
    torch.testing.assert_close(out, normed(before, weight).float(), atol=1e-5, rtol=1e-5)


def test_chosen_rows_are_normed_and_the_residual_is_left_as_it_is() -> None:
    x, residual, weight = randn(2, 9, 40, seed=1), randn(9, 40, seed=2), randn(40, seed=3)
    before, out = residual.clone(), torch.full((3, 40), torch.nan)
    rows = torch.tensor([8, 0, 3], dtype=torch.int32)
    add_norm(x, residual, weight, out, epsilon=EPSILON, rows_R=rows)
    assert torch.equal(residual, before)
    expected = normed(before + x.sum(0), weight)[rows.long()]
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)


def test_the_norm_is_that_of_the_rounded_residual() -> None:
    x, residual = randn(3, 4, 128, seed=1), randn(4, 128, seed=2, dtype=torch.float16)
    weight, out = randn(128, seed=3, dtype=torch.float16), torch.empty(4, 128, dtype=torch.float16)
    add_norm(x, residual, weight, out, epsilon=EPSILON)
    torch.testing.assert_close(out, normed(residual, weight).half(), atol=2e-3, rtol=2e-3)


def test_a_row_comes_out_the_same_alone_and_among_others() -> None:
    x, residual, weight = randn(4, 7, 300, seed=1), randn(7, 300, seed=2), randn(300, seed=3)
    alone, together = residual[5:6].clone(), residual.clone()
    out_alone, out_together = torch.empty(1, 300), torch.empty(7, 300)
    add_norm(x[:, 5:6], alone, weight, out_alone, epsilon=EPSILON)
    add_norm(x, together, weight, out_together, epsilon=EPSILON)
    assert torch.equal(out_alone[0], out_together[5])


def test_no_rows_are_no_launch() -> None:
    add_norm(None, torch.empty(0, 8), torch.ones(8), torch.empty(0, 8), epsilon=EPSILON)
