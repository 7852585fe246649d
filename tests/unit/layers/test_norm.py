import pytest
import torch

from pdserve.layers.norm import RmsNorm


def test_rows_are_scaled_to_unit_mean_square_then_by_the_gain() -> None:
    x = torch.tensor([[3.0, 4.0], [0.3, -0.4]])
    out = RmsNorm(torch.tensor([1.0, 2.0]), 0.0)(x)
    root = (12.5) ** 0.5
    torch.testing.assert_close(out, torch.tensor([[3 / root, 8 / root], [3 / root, -8 / root]]))


def test_a_row_of_zeros_stays_finite() -> None:
    assert torch.equal(RmsNorm(torch.ones(4), 1e-6)(torch.zeros(1, 4)), torch.zeros(1, 4))


@pytest.mark.parametrize("width", [64, 72, 576])
def test_a_row_is_bit_equal_whatever_the_number_of_rows(width: int) -> None:
    torch.set_num_threads(1)
    x = torch.randn(100, width, generator=torch.Generator().manual_seed(0))
    norm = RmsNorm(torch.ones(width), 1e-5)
    expected = norm(x)
    assert all(torch.equal(norm(x[:rows]), expected[:rows]) for rows in range(1, 100))
