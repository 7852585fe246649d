"""Paged attention of a few query tokens per sequence, bound by the reading of KV.

Letters: M query rows, S slots, H query heads, J KV heads, G query heads per KV head, D head dim,
B sequences, T query tokens per sequence.

The G * T rows that share a KV head go through the tensor cores as one matrix, so that KV is read
once. Each sequence's KV is cut into splits; splits, times KV heads, are dealt out to a fixed number
of programs, so that the grid depends on no length. The program that finishes a sequence's last
split adds the others' partial results up, always in the order of splits
(Flash-Decoding, https://pytorch.org/blog/flash-decoding/, in one launch).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = 1.4426950408889634
MAX_ROWS_PER_PROGRAM = 64
MAX_BALANCED_SPLITS = 64
CPU_PROGRAMS = 3
"""In the interpreter: few, so that each has several items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTuning:
    """How a launch is cut; the defaults are the best measured on an H200."""

    tile_tokens: int = 64
    """KV tokens that are read at once."""
    num_warps: int = 4
    num_stages: int = 3
    """Tiles in flight, and one more for the block table."""
    programs_per_sm: int = 3
    min_split_tokens: int = 128
    """Balanced splits are no shorter."""
    rounds: int = 2
    """Splits per program that balanced splitting aims at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeScratch:
    """Partial results of splits. Launches of one stream may share it."""

    partials: Tensor
    """float32 [max_rows * H * max_splits * D]."""
    stats: Tensor
    """float32 [2, max_rows * H * max_splits]: maxima and sums of rows."""
    counters: Tensor
    """int32 [max_rows * H], zero between launches: finished splits of each sequence and head."""
    max_rows: int
    max_splits: int


def make_scratch(
    max_rows: int, num_heads: int, head_dim: int, max_splits: int, device: torch.device | str
) -> DecodeScratch:
    """Allocates the scratch memory of `decode_attention`.

    Args:
        max_rows: query rows of the largest launch.
        num_heads: query heads.
        head_dim: of queries and KV.
        max_splits: splits of a sequence when all rows are there. Fewer rows may split further,
            but for splits of a fixed size.
        device: of the KV.
    """
    num_partials = max_rows * num_heads * max_splits
    return DecodeScratch(
        partials=torch.empty(num_partials * head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(2, num_partials, dtype=torch.float32, device=device),
        counters=torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device),
        max_rows=max_rows,
        max_splits=max_splits,
    )


def decode_attention(
    q_MHD: Tensor,
    keys_SJD: Tensor,
    values_SJD: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    out_MHD: Tensor,
    scratch: DecodeScratch,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    queries_per_sequence: int = 1,
    split_tokens: int | None = None,
    tuning: DecodeTuning | None = None,
    use_pdl: bool = False,
) -> None:
    """Attends from the last tokens of each sequence to its KV.

    Args:
        q_MHD: rotated queries; a sequence's tokens are neighbours, oldest first.
        keys_SJD: all key slots, the queries' own tokens included.
        values_SJD: all value slots, with the keys' strides.
        block_tables: int32 [B, max_blocks].
        lengths: int32 [B], KV tokens with the queries' own. At 0 the rows of `out_MHD` are left as
            they are; else at least `queries_per_sequence`.
        out_MHD: written in place.
        scratch: of `make_scratch`, for at least M rows.
        block_size: tokens of a block.
        scale: of scores.
        window: tokens that a query sees, itself included; None for all.
        soft_cap: scores are squeezed into (-soft_cap, soft_cap) by tanh; None leaves them.
        queries_per_sequence: T; each token sees itself and what is before it.
        split_tokens: a split's size. A sequence's result then depends on no other sequence. None
            cuts the batch into equal parts, which is quicker.
        tuning: None for the defaults.
        use_pdl: whether the launch may begin before the kernel ahead of it has ended (sm_90).
    """
    num_rows, num_heads, head_dim = q_MHD.shape
    num_kv_heads = keys_SJD.shape[1]
    batch = num_rows // queries_per_sequence
    assert num_rows <= scratch.max_rows
    assert keys_SJD.stride() == values_SJD.stride()
    assert keys_SJD.stride()[1:] == (head_dim, 1) == q_MHD.stride()[1:] == out_MHD.stride()[1:]
    tuning = DecodeTuning() if tuning is None else tuning
    rows_per_head = num_heads // num_kv_heads * queries_per_sequence
    rows = max(16, min(MAX_ROWS_PER_PROGRAM, triton.next_power_of_2(rows_per_head)))
    num_row_groups = triton.cdiv(rows_per_head, rows)
    max_splits = scratch.max_splits
    if split_tokens is None:
        max_splits = min(MAX_BALANCED_SPLITS, max_splits * scratch.max_rows // num_rows)
    programs_per_sm = max(1, tuning.programs_per_sm * 16 // max(16, rows))
    num_programs = min(
        _num_processors(q_MHD.device) * programs_per_sm,
        batch * num_kv_heads * num_row_groups * max_splits,
    )
    _decode_kernel[(num_programs,)](
        q_MHD,
        keys_SJD,
        values_SJD,
        block_tables,
        lengths,
        out_MHD,
        scratch.partials,
        scratch.stats,
        scratch.stats[1],
        scratch.counters,
        q_MHD.stride(0),
        keys_SJD.stride(0),
        block_tables.stride(0),
        out_MHD.stride(0),
        batch,
        tuning.min_split_tokens if split_tokens is None else split_tokens,
        max(1, num_programs * tuning.rounds // (num_kv_heads * num_row_groups)),
        scale * LOG2_E,
        J=num_kv_heads,
        GT=rows_per_head,
        T=queries_per_sequence,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        ROWS=rows,
        MERGE_ROWS=triton.next_power_of_2(min(rows_per_head, rows)),
        MERGE_SPLITS=max(1, min(8, 64 // triton.next_power_of_2(min(rows_per_head, rows)))),
        BATCH_PAD=max(16, triton.next_power_of_2(batch)),
        BLOCK_SIZE=block_size,
        TILE=tuning.tile_tokens,
        MAX_SPLITS=max_splits,
        SPLITS_PAD=triton.next_power_of_2(max_splits),
        WINDOW=window,
        SOFT_CAP=None if soft_cap is None else soft_cap * LOG2_E,
        IS_BALANCED=split_tokens is None,
        USE_PDL=use_pdl,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=use_pdl,
    )


def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _first_token(lengths, T: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Returns where the oldest query's reach begins, rounded down to a tile."""
    if WINDOW is None:
        return lengths * 0
    else:
        return tl.maximum(lengths - (T - 1) - WINDOW, 0) // TILE * TILE


@triton.jit
def _span(
    num_tokens, target, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, IS_BALANCED: tl.constexpr
):
    """Returns the tokens of each split but the last, a multiple of a tile."""
    num_splits = tl.maximum(tl.cdiv(num_tokens, target), 1)
    if IS_BALANCED:
        share = tl.cdiv(num_tokens, tl.minimum(num_splits, MAX_SPLITS))
        return tl.maximum(tl.cdiv(share, TILE), 1) * TILE
    else:
        return target * tl.cdiv(num_splits, MAX_SPLITS)


@triton.jit(do_not_specialize=["table_stride", "batch", "split_tokens", "num_shares"])
def _decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    partials_ptr,
    maxima_ptr,
    sums_ptr,
    counters_ptr,
    q_stride,
    kv_stride,
    table_stride,
    out_stride,
    batch,
    split_tokens,
    num_shares,
    scale,
    J: tl.constexpr,
    GT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_BALANCED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    G: tl.constexpr = GT // T
    GROUPS: tl.constexpr = (GT + ROWS - 1) // ROWS
    HEADS: tl.constexpr = J * GROUPS
    # Lengths and tables were written kernels ago: they may be read before the wait.
    offs_b = tl.arange(0, BATCH_PAD)
    lengths = tl.load(lengths_ptr + offs_b, mask=offs_b < batch, other=0)
    num_tokens = lengths - _first_token(lengths, T, TILE, WINDOW)
    target = split_tokens
    if IS_BALANCED:
        target = tl.maximum(tl.cdiv(tl.sum(num_tokens, 0), num_shares), split_tokens)
    spans = _span(num_tokens, target, TILE, MAX_SPLITS, IS_BALANCED)
    split_ends = tl.cumsum(tl.cdiv(num_tokens, spans), 0)
    num_items = tl.max(split_ends, 0) * HEADS
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()

    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        unit = item // HEADS
        head = item % HEADS // GROUPS
        first_row = item % GROUPS * ROWS
        sequence = tl.sum((split_ends <= unit).to(tl.int32), 0)
        split = unit - tl.max(tl.where(offs_b < sequence, split_ends, 0), 0)
        length = tl.load(lengths_ptr + sequence)
        first = _first_token(length, T, TILE, WINDOW)
        span = _span(length - first, target, TILE, MAX_SPLITS, IS_BALANCED)
        num_splits = tl.cdiv(length - first, span)
        start = first + split * span
        end = tl.minimum(start + span, length)

        rows = first_row + tl.arange(0, ROWS)
        offs_d = tl.arange(0, D_PAD)
        row_index = (sequence * T + rows // G).to(tl.int64)
        columns = (head * G + rows % G)[:, None] * D + offs_d[None, :]
        row_mask = (rows < GT)[:, None] & (offs_d < D)[None, :]
        q = tl.load(q_ptr + row_index[:, None] * q_stride + columns, mask=row_mask, other=0.0)
        limits = length - (T - 1) + rows // G
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        offs_n = start + tl.arange(0, TILE)
        blocks = tl.load(table_ptr + offs_n // BLOCK_SIZE, mask=offs_n < end, other=0)
        for tile in range(start, end, TILE):
            offs_n = tile + tl.arange(0, TILE)
            exists = offs_n < end
            slots = blocks.to(tl.int64) * BLOCK_SIZE + offs_n % BLOCK_SIZE
            offsets = slots[:, None] * kv_stride + head * D + offs_d[None, :]
            kv_mask = exists[:, None] & (offs_d < D)[None, :]
            # One tile ahead: a load that waits for another would take a stage of its own.
            blocks = tl.load(
                table_ptr + (offs_n + TILE) // BLOCK_SIZE, mask=offs_n + TILE < end, other=0
            )
            k = tl.load(keys_ptr + offsets, mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if SOFT_CAP is not None:
                # tanh(x) = 1 - 2 / (e^2x + 1), right for any x.
                grown = tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
                scores = SOFT_CAP - 2.0 * SOFT_CAP / (grown + 1.0)
            is_seen = exists[None, :]
            if T > 1:
                is_seen &= offs_n[None, :] < limits[:, None]
            if WINDOW is not None:
                is_seen &= offs_n[None, :] >= limits[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = new_top
            if T > 1 or WINDOW is not None:
                # A row may see nothing of a tile: -inf less -inf is no number.
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            top = new_top
            v = tl.load(values_ptr + offsets, mask=kv_mask, other=0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")

        if num_splits == 1:
            out = (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row_index[:, None] * out_stride + columns, out, mask=row_mask)
        else:
            place = (sequence * J + head) * MAX_SPLITS
            part_rows = (place + split).to(tl.int64) * GT + rows
            tl.store(partials_ptr + part_rows[:, None] * D + offs_d[None, :], acc, mask=row_mask)
            tl.store(maxima_ptr + part_rows, top, mask=rows < GT)
            tl.store(sums_ptr + part_rows, total, mask=rows < GT)
            # All threads have stored before one of them announces it.
            tl.debug_barrier()
            counter_ptr = counters_ptr + sequence * HEADS + item % HEADS
            num_done = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
            if num_done == num_splits:
                tl.store(counter_ptr, 0)
                out_rows = first_row + tl.arange(0, MERGE_ROWS)
                merged = _merge(
                    partials_ptr,
                    maxima_ptr,
                    sums_ptr,
                    place.to(tl.int64) * GT,
                    num_splits,
                    out_rows,
                    GT,
                    D,
                    D_PAD,
                    MERGE_ROWS,
                    MERGE_SPLITS,
                    SPLITS_PAD,
                )
                out_index = (sequence * T + out_rows // G).to(tl.int64)
                out_columns = (head * G + out_rows % G)[:, None] * D + offs_d[None, :]
                tl.store(
                    out_ptr + out_index[:, None] * out_stride + out_columns,
                    merged.to(out_ptr.dtype.element_ty),
                    mask=(out_rows < GT)[:, None] & (offs_d < D)[None, :],
                )


@triton.jit
def _merge(
    partials_ptr,
    maxima_ptr,
    sums_ptr,
    place,
    num_splits,
    rows,
    GT: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Adds the partial results of a sequence's splits up, [MERGE_ROWS, D_PAD]."""
    offs_d = tl.arange(0, D_PAD)
    splits = tl.arange(0, SPLITS_PAD)
    index = place + splits[:, None] * GT + rows[None, :]
    mask = (splits < num_splits)[:, None] & (rows < GT)[None, :]
    # Other processors wrote these: L1 is passed by.
    maxima = tl.load(maxima_ptr + index, mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(sums_ptr + index, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(maxima, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp2(maxima - top[None, :]), 0)
    acc = tl.zeros([MERGE_ROWS, D_PAD], tl.float32)
    for first in range(0, num_splits, MERGE_SPLITS):
        some = first + tl.arange(0, MERGE_SPLITS)
        places = place + some[:, None] * GT + rows[None, :]
        exists = (some < num_splits)[:, None] & (rows < GT)[None, :]
        part_maxima = tl.load(
            maxima_ptr + places, mask=exists, other=float("-inf"), cache_modifier=".cg"
        )
        parts = tl.load(
            partials_ptr + places[:, :, None] * D + offs_d[None, None, :],
            mask=exists[:, :, None] & (offs_d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(parts * tl.exp2(part_maxima - top[None, :])[:, :, None], 0)
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
