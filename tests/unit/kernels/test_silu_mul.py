import pytest
import torch

from pdserve.kernels.silu_mul import silu_mul


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


@pytest.mark.parametrize("num_rows", [1, 6])
@pytest.mark.parametrize("num_inner", [1, 48, 257])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_gate_s_silu_is_multiplied_with_the_other_half(
    num_rows: int, num_inner: int, num_splits: int
) -> None:
    x = randn(num_splits, num_rows, 2 * num_inner)
    out = torch.full((num_rows, num_inner), torch.nan)
    silu_mul(x, out)
    torch.testing.assert_close(out, gated(x.sum(0)).float(), atol=1e-5, rtol=1e-5)


def test_a_bias_is_added_before_the_gate() -> None:
    x, bias = randn(2, 5, 140), randn(140, seed=1)
    out = torch.full((5, 70), torch.nan)
    silu_mul(x, out, bias_N=bias)
    torch.testing.assert_close(out, gated(x.sum(0) + bias).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_neither_overflow_nor_vanish() -> None:
    x = torch.tensor([[[1e4, -1e4, 0.0, 2.0, 3.0, 4.0]]])
    out = torch.empty(1, 3)
    silu_mul(x, out)
    assert out.tolist() == [[20000.0, 0.0, 0.0]]


def test_narrow_outputs_are_rounded_once() -> None:
    x = randn(4, 3, 64)
    out = torch.empty(3, 32, dtype=torch.float16)
    silu_mul(x, out)
    torch.testing.assert_close(out, gated(x.sum(0)).half(), atol=1e-3, rtol=1e-3)
