"""Causal attention of long chunks: KV gathered from its blocks, then cuDNN's dense kernel.

On an H200 it runs at 595 TFLOP/s for 8192 tokens and 660 for 32768, gather included, where the
paged kernel of `pdserve.kernels.prefill_attention` reaches 400 to 430. But cuDNN knows no paged KV,
no window, no soft cap and only top-left causal masks, and spends 70 ms of host time on the plan of
every new batch and pair of lengths. So lengths are rounded up to buckets:

    cached:  [ far: whole buckets, seen by every query | rest ]
    near:                                              [ rest | chunk | padding ]   causal

The rest of the cached tokens has dummy queries, which make the mask of `near` top-left; what the
queries get from both parts is joined by the logarithms of their sums.

Letters: T query tokens, S slots, N KV tokens, H query heads, J KV heads, D head dim, B sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.reference import gather_blocks

BUCKET_TOKENS = 256
LEAST_TOKENS = 2048
"""Shorter chunks are as quick in the paged kernel."""
LEAST_TOKENS_BEHIND_OTHERS = 4096
"""Lengths of cached tokens are many, and each costs a plan: only long chunks win that back."""


def is_dense_faster(num_queries: int, context: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether chunks without window and soft cap should come here; measured on sm_90."""
    least = LEAST_TOKENS_BEHIND_OTHERS if context else LEAST_TOKENS
    return num_queries >= least and head_dim in (64, 128) and dtype.itemsize == 2


def build_plans(
    max_query_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> int:
    """Has cuDNN plan all buckets of single chunks that nothing is before, 70 ms each.

    Returns:
        How many there are.
    """
    buckets = range(LEAST_TOKENS, max_query_tokens + BUCKET_TOKENS, BUCKET_TOKENS)
    for num_tokens in buckets:
        q = torch.zeros(1, num_tokens, num_heads, head_dim, dtype=dtype, device=device)
        kv = torch.zeros(1, num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device)
        _attend(q, kv, kv, 1.0, is_causal=True)
    return len(buckets)


def dense_attention(
    q_BTHD: Tensor,
    keys_SJD: Tensor,
    values_SJD: Tensor,
    block_tables: Tensor,
    *,
    context: int,
    block_size: int,
    scale: float,
) -> Tensor:
    """Attends from chunks of equal length behind equally many tokens to KV up to themselves.

    A row's bits depend on its chunk; deterministic mode has to use the paged kernel.

    Args:
        q_BTHD: rotated queries.
        keys_SJD: all key slots, the chunks' own tokens included.
        values_SJD: all value slots.
        block_tables: int [B, max_blocks], on the device.
        context: KV tokens before each chunk.
        block_size: tokens of a block; divides a bucket or is a multiple of it.
        scale: of scores.

    Returns:
        [B, T, H, D]; rows of heads are contiguous.
    """
    batch, num_queries = q_BTHD.shape[:2]
    far_tokens = context // BUCKET_TOKENS * BUCKET_TOKENS
    rest = context - far_tokens
    near_tokens = -(-(rest + num_queries) // BUCKET_TOKENS) * BUCKET_TOKENS
    num_blocks = -(-(context + num_queries) // block_size)
    index = block_tables[:, :num_blocks].flatten()
    keys_BNJD, values_BNJD = (
        gather_blocks(part, index, block_size).unflatten(0, (batch, -1))
        for part in (keys_SJD, values_SJD)
    )
    padding = near_tokens - rest - num_queries
    near_q = functional.pad(q_BTHD, (0, 0, 0, 0, rest, padding)) if rest + padding else q_BTHD
    near, near_log_sums = _attend(
        near_q,
        _fit(keys_BNJD, far_tokens, near_tokens, rest + num_queries),
        _fit(values_BNJD, far_tokens, near_tokens, rest + num_queries),
        scale,
        is_causal=True,
    )
    if far_tokens:
        far, far_log_sums = _attend(
            near_q, keys_BNJD[:, :far_tokens], values_BNJD[:, :far_tokens], scale, is_causal=False
        )
        for row in range(batch):
            _join(near[row], far[row], near_log_sums[row], far_log_sums[row])
    return near[:, rest : rest + num_queries]


def _fit(kv_BNJD: Tensor, first: int, num_tokens: int, num_written: int) -> Tensor:
    """Returns tokens from `first` on; zeros behind what is written, which might be NaN."""
    written = kv_BNJD[:, first : first + num_written]
    if num_written == num_tokens:
        return written
    return functional.pad(written, (0, 0, 0, 0, 0, num_tokens - num_written))


def _attend(
    q_BTHD: Tensor, keys_BNJD: Tensor, values_BNJD: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns outputs [B, T, H, D] and natural logarithms of sums [B, H, T]."""
    q, k, v = (part.transpose(1, 2) for part in (q_BTHD, keys_BNJD, values_BNJD))
    if q.is_cuda:
        # cuDNN knows groups of query heads; torch's own checks of them are in front of this op.
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
    else:
        group = q.shape[1] // k.shape[1]
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            0.0,
            is_causal,
            scale=scale,
        )
    return result[0].transpose(1, 2), result[1].reshape(q.shape[:3]).contiguous()


def _join(
    near_THD: Tensor, far_THD: Tensor, near_log_sums_HT: Tensor, far_log_sums_HT: Tensor
) -> None:
    """Adds what was seen of the far part to `near_THD`, in place."""
    num_queries, num_heads, head_dim = near_THD.shape
    _join_kernel[(num_queries,)](
        near_THD,
        far_THD,
        near_log_sums_HT,
        far_log_sums_HT,
        near_THD.stride(0),
        near_THD.stride(1),
        far_THD.stride(0),
        far_THD.stride(1),
        near_log_sums_HT.stride(0),
        far_log_sums_HT.stride(0),
        H=num_heads,
        D=head_dim,
        H_PAD=triton.next_power_of_2(num_heads),
        D_PAD=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


@triton.jit
def _join_kernel(
    near_ptr,
    far_ptr,
    near_log_sums_ptr,
    far_log_sums_ptr,
    near_stride,
    near_head_stride,
    far_stride,
    far_head_stride,
    near_log_stride,
    far_log_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    H_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, H_PAD)
    offs_d = tl.arange(0, D_PAD)
    near_log = tl.load(near_log_sums_ptr + heads * near_log_stride + row, mask=heads < H, other=0.0)
    far_log = tl.load(far_log_sums_ptr + heads * far_log_stride + row, mask=heads < H, other=0.0)
    share = 1.0 / (1.0 + tl.exp2((near_log - far_log) * 1.4426950408889634))
    mask = (heads < H)[:, None] & (offs_d < D)[None, :]
    near_ptrs = near_ptr + row * near_stride + heads[:, None] * near_head_stride + offs_d[None, :]
    far_ptrs = far_ptr + row * far_stride + heads[:, None] * far_head_stride + offs_d[None, :]
    near = tl.load(near_ptrs, mask=mask, other=0.0).to(tl.float32)
    far = tl.load(far_ptrs, mask=mask, other=0.0).to(tl.float32)
    joined = near + (far - near) * share[:, None]
    tl.store(near_ptrs, joined.to(near_ptr.dtype.element_ty), mask=mask)
