import pytest
import torch

from benchmarks.kernels.paged import BLOCK_SIZE, attend_exactly, make_paged_kv, relative_error
from pdserve.kernels.dense_attention import build_plans, dense_attention, is_dense_faster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
MAX_ERROR = 5e-3 if torch.cuda.is_available() else 1e-5


@pytest.mark.parametrize(
    ("context", "num_queries", "batch"),
    [(0, 256, 1), (0, 300, 2), (512, 10, 2), (300, 20, 1), (256, 256, 1), (7, 249, 2)],
)
def test_a_chunk_sees_what_is_cached_and_itself_up_to_each_token(
    context: int, num_queries: int, batch: int
) -> None:
    torch.manual_seed(context + num_queries)
    lengths = [context + num_queries] * batch
    kv = make_paged_kv(lengths, 2, 64, is_poisoned=True, dtype=DTYPE, device=DEVICE)
    q = torch.randn(batch, num_queries, 6, 64, dtype=DTYPE, device=DEVICE)
    out = dense_attention(
        q, kv.keys, kv.values, kv.tables, context=context, block_size=BLOCK_SIZE, scale=64**-0.5
    )
    positions = range(context, context + num_queries)
    expected = torch.stack([attend_exactly(q[row], kv, row, positions) for row in range(batch)])
    assert relative_error(out, expected) < MAX_ERROR


@pytest.mark.parametrize("gain", [30.0, 0.01])
def test_parts_of_very_unequal_weight_are_joined_right(gain: float) -> None:
    torch.manual_seed(1)
    kv = make_paged_kv([300], 1, 64, dtype=DTYPE, device=DEVICE)
    kv.keys[kv.slots(0, 256)] *= gain
    q = torch.randn(1, 44, 2, 64, dtype=DTYPE, device=DEVICE)
    out = dense_attention(
        q, kv.keys, kv.values, kv.tables, context=256, block_size=BLOCK_SIZE, scale=64**-0.5
    )
    expected = attend_exactly(q[0], kv, 0, range(256, 300))
    assert relative_error(out[0], expected) < MAX_ERROR


def test_short_chunks_and_single_precision_stay_with_the_paged_kernel() -> None:
    assert is_dense_faster(2048, 0, 128, torch.bfloat16)
    assert not is_dense_faster(512, 0, 128, torch.bfloat16)
    assert not is_dense_faster(2048, 2048, 128, torch.bfloat16)
    assert is_dense_faster(4096, 2048, 128, torch.bfloat16)
    assert not is_dense_faster(8192, 0, 128, torch.float32)
    assert not is_dense_faster(8192, 0, 80, torch.bfloat16)


def test_all_buckets_up_to_the_longest_chunk_are_planned() -> None:
    assert build_plans(2500, 2, 1, 64, DTYPE, DEVICE) == 3
