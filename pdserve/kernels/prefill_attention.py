"""Paged causal attention of prompt chunks, bound by arithmetic.

Letters: M query rows, S slots, H query heads, J KV heads, D head dim, B sequences.

A program computes a tile of a sequence's queries for one head (FlashAttention-2,
https://arxiv.org/abs/2307.08691). KV tiles begin at multiples of their size counted from the
sequence's first token, and a tile that a row does not see changes none of its bits: a row's result
depends neither on how its prompt is cut into chunks nor on what else is in the batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.merge import merge_splits
from pdserve.kernels.prefill_tuning import PrefillTuning, tuning_for

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillScratch:
    """Partial results of splits. Launches of one stream may share it."""

    partials: Tensor
    """float32 [max_splits * max_rows * H * D], each split's output."""
    log_sums: Tensor
    """float32 [max_splits * max_rows * H], logarithms to base 2 of each split's sum."""


def make_scratch(
    max_rows: int, num_heads: int, head_dim: int, max_splits: int, device: torch.device | str
) -> PrefillScratch:
    """Allocates the scratch memory of launches of up to `max_splits * max_rows` rows and splits."""
    num_partials = max_splits * max_rows * num_heads
    return PrefillScratch(
        partials=torch.empty(num_partials * head_dim, dtype=torch.float32, device=device),
        log_sums=torch.empty(num_partials, dtype=torch.float32, device=device),
    )


def prefill_attention(
    q_MHD: Tensor,
    keys_SJD: Tensor,
    values_SJD: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    out_MHD: Tensor,
    *,
    max_query_tokens: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int = 1,
    scratch: PrefillScratch | None = None,
    tuning: PrefillTuning | None = None,
    use_pdl: bool = False,
) -> None:
    """Attends from each chunk's tokens to its sequence's KV up to themselves.

    Args:
        q_MHD: rotated queries. Rows from `query_starts[B]` on are padding: their `out_MHD` is left
            as it is.
        keys_SJD: all key slots, the chunks' own tokens included.
        values_SJD: all value slots, with the keys' strides.
        block_tables: int32 [B, max_blocks].
        query_starts: int32 [B + 1], rows of `q_MHD` where chunks begin and the last one ends.
        context_lengths: int32 [B], KV tokens before the chunk.
        out_MHD: written in place.
        max_query_tokens: no chunk of the launch is longer.
        block_size: tokens of a block.
        scale: of scores, above 0.
        window: tokens that a query sees, itself included; None for all.
        soft_cap: scores are squeezed into (-soft_cap, soft_cap) by tanh; None leaves them.
        num_splits: parts that the KV of each tile is cut into, for launches of too few tiles to
            fill the device. A row's bits depend on it, and with 2 or more on its chunk.
        scratch: of `make_scratch`; needed for 2 or more splits.
        tuning: None for those of `tuning_for`.
        use_pdl: whether the launch may begin before the kernel ahead of it has ended (sm_90).
    """
    num_rows, num_heads, head_dim = q_MHD.shape
    num_kv_heads = keys_SJD.shape[1]
    batch = context_lengths.shape[0]
    assert scale > 0.0
    assert keys_SJD.stride() == values_SJD.stride()
    assert keys_SJD.stride()[1:] == (head_dim, 1) == q_MHD.stride()[1:] == out_MHD.stride()[1:]
    tuning = tuning_for(num_rows, head_dim, q_MHD.dtype) if tuning is None else tuning
    tile = tuning.tile_queries
    num_tiles = min(
        triton.cdiv(num_rows, tile) + batch - 1, batch * triton.cdiv(max_query_tokens, tile)
    )
    # Without splits the scratch is never touched; any tensor will do.
    partials, log_sums = out_MHD, out_MHD
    if num_splits > 1:
        assert scratch is not None
        partials, log_sums = scratch.partials, scratch.log_sums
        assert num_splits * num_rows * num_heads <= log_sums.numel()
    _prefill_kernel[(num_tiles * num_heads, num_splits)](
        q_MHD,
        keys_SJD,
        values_SJD,
        block_tables,
        query_starts,
        context_lengths,
        out_MHD,
        partials,
        log_sums,
        q_MHD.stride(0),
        keys_SJD.stride(0),
        block_tables.stride(0),
        out_MHD.stride(0),
        batch,
        num_rows,
        scale * LOG2_E,
        H=num_heads,
        J=num_kv_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BATCH_PAD=max(16, triton.next_power_of_2(batch)),
        BLOCK_SIZE=block_size,
        TILE_M=tile,
        TILE_N=tuning.tile_tokens,
        WINDOW=window,
        SOFT_CAP=None if soft_cap is None else soft_cap * LOG2_E,
        SPLITS=num_splits,
        USE_PDL=use_pdl,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        launch_pdl=use_pdl,
    )
    if num_splits > 1:
        merge_splits(
            partials, log_sums, query_starts[-1:], out_MHD, num_splits=num_splits, use_pdl=use_pdl
        )


@triton.jit
def _load_blocks(table_ptr, offs_n, end, BLOCK_SIZE: tl.constexpr):
    return tl.load(table_ptr + offs_n // BLOCK_SIZE, mask=offs_n < end, other=0)


@triton.jit
def _kv_offsets(blocks, offs_n, offs_d, kv_stride, BLOCK_SIZE: tl.constexpr):
    slots = blocks.to(tl.int64) * BLOCK_SIZE + offs_n % BLOCK_SIZE
    return slots[:, None] * kv_stride + offs_d[None, :]


@triton.jit
def _load_kv(
    ptr, offsets, offs_n, offs_d, end, D: tl.constexpr, D_PAD: tl.constexpr, IS_MASKED: tl.constexpr
):
    if IS_MASKED:
        return tl.load(
            ptr + offsets, mask=(offs_n < end)[:, None] & (offs_d < D)[None, :], other=0.0
        )
    elif D == D_PAD:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=(offs_d < D)[None, :], other=0.0)


@triton.jit
def _add_tile(
    scores,
    v,
    top,
    total,
    acc,
    positions,
    offs_n,
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds a KV tile's scores and values to the running softmax."""
    if SOFT_CAP is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), right for any x.
        grown = tl.exp2(scores * (scale * (2.0 * 1.4426950408889634 / SOFT_CAP)))
        scores = SOFT_CAP - 2.0 * SOFT_CAP / (grown + 1.0)
        scale = 1.0
    if IS_MASKED:
        is_seen = offs_n[None, :] <= positions[:, None]
        if WINDOW is not None:
            is_seen &= offs_n[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if IS_MASKED and (WINDOW is not None or SPLITS > 1):
        # A row may see nothing of its first tile: -inf less -inf is no number.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _find_tile(starts_ptr, batch, unit, BATCH_PAD: tl.constexpr, TILE_M: tl.constexpr):
    """Returns the sequence of a program (`batch` if there is none) and its tile's first query."""
    offs_b = tl.arange(0, BATCH_PAD)
    starts = tl.load(starts_ptr + offs_b, mask=offs_b < batch, other=0)
    ends = tl.load(starts_ptr + 1 + offs_b, mask=offs_b < batch, other=0)
    tile_ends = tl.cumsum(tl.cdiv(ends - starts, TILE_M), 0)
    sequence = tl.sum((tile_ends <= unit).to(tl.int32), 0)
    # The last tiles have the most to do: they go first.
    tile = tl.max(tl.where(offs_b == sequence, tile_ends, 0), 0) - 1 - unit
    return tl.minimum(sequence, batch), tile * TILE_M


@triton.jit(do_not_specialize=["table_stride", "batch", "num_rows"])
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    out_ptr,
    partials_ptr,
    log_sums_ptr,
    q_stride,
    kv_stride,
    table_stride,
    out_stride,
    batch,
    num_rows,
    scale,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Heads of one tile run side by side and share its KV in L2.
    head = tl.program_id(0) % H
    sequence, first_query = _find_tile(starts_ptr, batch, tl.program_id(0) // H, BATCH_PAD, TILE_M)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if sequence == batch:
        return
    start = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - start
    context = tl.load(contexts_ptr + sequence)

    offs_d = tl.arange(0, D_PAD)
    queries = first_query + tl.arange(0, TILE_M)
    rows = (start + queries).to(tl.int64)
    row_mask = (queries < num_queries)[:, None] & (offs_d < D)[None, :]
    offsets = rows[:, None] * q_stride + head * D + offs_d[None, :]
    q = tl.load(q_ptr + offsets, mask=row_mask, other=0.0)
    end = tl.minimum(context + first_query + TILE_M, context + num_queries)
    first = 0
    full_end = (context + first_query + 1) // TILE_N * TILE_N
    if WINDOW is not None:
        first = tl.maximum(context + first_query + 1 - WINDOW, 0) // TILE_N * TILE_N
        full_end = first
    if SPLITS > 1:
        span = tl.cdiv(tl.cdiv(end - first, SPLITS), TILE_N) * TILE_N
        first += tl.program_id(1) * span
        end = tl.minimum(first + span, end)
        full_end = tl.minimum(full_end, end)
    top, total, acc = _attend(
        q,
        keys_ptr + head // (H // J) * D,
        values_ptr + head // (H // J) * D,
        tables_ptr + sequence.to(tl.int64) * table_stride,
        context + queries,
        first,
        full_end,
        end,
        kv_stride,
        scale,
        D,
        D_PAD,
        BLOCK_SIZE,
        TILE_M,
        TILE_N,
        WINDOW,
        SOFT_CAP,
        SPLITS,
    )
    # Padding behind a chunk's end may have seen nothing of a window or of a split.
    total = tl.where(total > 0.0, total, 1.0)
    out = acc / total[:, None]
    if SPLITS == 1:
        offsets = rows[:, None] * out_stride + head * D + offs_d[None, :]
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        places = (tl.program_id(1).to(tl.int64) * num_rows + rows) * H + head
        tl.store(partials_ptr + places[:, None] * D + offs_d[None, :], out, mask=row_mask)
        log_sums = top + tl.log2(total)
        tl.store(log_sums_ptr + places, log_sums, mask=queries < num_queries)


@triton.jit
def _attend(
    q,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions,
    first,
    full_end,
    end,
    kv_stride,
    scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Returns each row's maximum, sum and weighted values over tokens from `first` to `end`.

    All rows see all tokens before `full_end`.
    """
    offs = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, D_PAD)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, D_PAD], tl.float32)
    blocks = _load_blocks(table_ptr, first + offs, end, BLOCK_SIZE)
    for tile in range(first, full_end, TILE_N):
        offs_n = tile + offs
        offsets = _kv_offsets(blocks, offs_n, offs_d, kv_stride, BLOCK_SIZE)
        # One tile ahead: a load that waits for another would take a stage of its own.
        blocks = _load_blocks(table_ptr, offs_n + TILE_N, end, BLOCK_SIZE)
        k = _load_kv(keys_ptr, offsets, offs_n, offs_d, end, D, D_PAD, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = _load_kv(values_ptr, offsets, offs_n, offs_d, end, D, D_PAD, False)
        top, total, acc = _add_tile(
            scores, v, top, total, acc, positions, offs_n, scale, WINDOW, SOFT_CAP, SPLITS, False
        )
    for tile in range(tl.maximum(first, full_end), end, TILE_N):
        offs_n = tile + offs
        blocks = _load_blocks(table_ptr, offs_n, end, BLOCK_SIZE)
        offsets = _kv_offsets(blocks, offs_n, offs_d, kv_stride, BLOCK_SIZE)
        k = _load_kv(keys_ptr, offsets, offs_n, offs_d, end, D, D_PAD, True)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = _load_kv(values_ptr, offsets, offs_n, offs_d, end, D, D_PAD, True)
        top, total, acc = _add_tile(
            scores, v, top, total, acc, positions, offs_n, scale, WINDOW, SOFT_CAP, SPLITS, True
        )
    return top, total, acc
