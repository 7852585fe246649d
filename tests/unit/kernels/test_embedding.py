import pytest
import torch

from pdserve.kernels.embedding import embed, embed_and_norm


@pytest.mark.parametrize("num_columns", [8, 100, 576])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_rows_of_the_table_are_copied_bit_by_bit(num_columns: int, id_dtype: torch.dtype) -> None:
    table = torch.randn(33, num_columns, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([32, 0, 5, 5], dtype=id_dtype)
    out = torch.full((4, num_columns), torch.nan)
    embed(ids, table, out)
    assert torch.equal(out, table[ids.long()])


def test_the_first_norm_comes_with_them() -> None:
    table = torch.randn(33, 100, generator=torch.Generator().manual_seed(0))
    gain = torch.randn(100, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([7, 31, 7])
    residual, out = torch.full((2, 3, 100), torch.nan)
    embed_and_norm(ids, table, residual, gain, out, epsilon=1e-6)
    wide = table[ids].double()
    expected = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * gain.double()
    assert torch.equal(residual, table[ids])
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
