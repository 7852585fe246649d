import pytest
import torch

from pdserve.kernels.copy_engine import can_store_in_bulk, describe_result, describe_rows
from pdserve.kernels.product_plan import ProductPlan

PLAN = ProductPlan(
    kernel="streamed", num_splits=1, block_n=128, block_k=64, num_stages=6, num_warps=4
)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_rows_in_a_larger_buffer_are_read_in_whole_tiles() -> None:
    buffer = empty(512, 256)
    described = describe_rows(buffer[:96], 128, 64)
    assert list(described.shape) == [128, 256]
    assert described.base.data_ptr() == buffer.data_ptr()


def test_rows_at_the_end_of_their_memory_are_read_no_further() -> None:
    assert list(describe_rows(empty(96, 256), 128, 64).shape) == [96, 256]
    assert list(describe_rows(empty(200, 256)[100:], 128, 64).shape) == [100, 256]


def test_the_last_row_of_a_wider_matrix_counts_only_with_its_own_inputs() -> None:
    wide = empty(128, 512)
    described = describe_rows(wide[:96, :256], 128, 64)
    assert list(described.shape) == [128, 256]
    assert list(described.strides) == [512, 1]


def test_whole_tiles_need_no_more_memory_than_they_have() -> None:
    assert list(describe_rows(empty(256, 64), 128, 64).shape) == [256, 64]


def test_a_split_of_the_result_ends_with_its_own_rows() -> None:
    described = describe_result(empty(2, 96, 256, dtype=torch.float32), 128, 128)
    assert list(described.shape) == [2, 96, 256]
    assert list(described.block_shape) == [1, 128, 128]


@pytest.mark.parametrize(
    ("num_outputs", "dtype", "block_m", "num_stages", "expected"),
    [
        (4096, torch.bfloat16, 128, 6, True),
        (4096, torch.float32, 128, 6, True),
        (4096, torch.float32, 128, 3, False),  # 64 KiB of sums, 48 KiB of rows
        (4096, torch.bfloat16, 128, 3, True),
        (4096, torch.bfloat16, 32, 6, False),
        (1001, torch.bfloat16, 128, 6, False),
        (1004, torch.float32, 128, 6, True),
    ],
)
def test_a_result_is_stored_in_bulk_if_it_is_large_and_fits_and_its_rows_are_aligned(
    num_outputs: int, dtype: torch.dtype, block_m: int, num_stages: int, expected: bool
) -> None:
    out = empty(1, 128, num_outputs, dtype=dtype)
    assert can_store_in_bulk(out, PLAN, block_m, num_stages) is expected
