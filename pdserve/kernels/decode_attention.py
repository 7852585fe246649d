"""Paged attention of a few query tokens per sequence, bound by the reading of KV.

Letters: M query rows, S slots, H query heads, J KV heads, G query heads per KV head, D head dim,
B sequences, T query tokens per sequence.

The G * T rows that share a KV head go through the tensor cores as one matrix, so that KV is read
once. The KV of all sequences is dealt out to a fixed number of programs, so that the grid depends
on no length (`pdserve.kernels.decode_shares`); a second kernel adds the pieces of a sequence up,
always in their order (Flash-Decoding, https://pytorch.org/blog/flash-decoding/).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.block_table import find_slots, load_blocks, prefetch_rows
from pdserve.kernels.decode_merge import merge_pieces_kernel
from pdserve.kernels.decode_shares import (
    count_pieces,
    count_tiles,
    first_token,
    share_tiles,
    split_tiles,
)

LOG2_E = 1.4426950408889634
MAX_ROWS_PER_PROGRAM = 64
MAX_BALANCED_SPLITS = 128
SHARED_BYTES_PER_PROGRAM = 1024
"""Of each program, beside what it asks for."""
CPU_PROGRAMS = 3
"""In the interpreter: few, so that each has several pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTuning:
    """How a launch is cut; the defaults are the best measured on an H200."""

    tile_tokens: int = 32
    """KV tokens that are read at once."""
    num_warps: int = 1
    """For each 16 rows. With one, warps never wait for one another."""
    num_stages: int = 3
    """Tiles in shared memory, and one more."""
    programs_per_sm: int = 6
    least_tiles: int = 2
    """Balanced shares are no smaller."""
    prefetched_tiles: int = 4
    """Brought into L2 while the kernel ahead still runs, if `use_pdl`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeScratch:
    """Partial results of pieces. Launches of one stream may share it."""

    partials: Tensor
    """float32 [max_rows * H * max_splits * D]."""
    log_sums: Tensor
    """float32 [max_rows * H * max_splits]: logarithms to base 2 of each row's sum."""
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
        max_splits: pieces of a sequence when all rows are there, at least 2. Fewer rows may be cut
            further, but for splits of a fixed size.
        device: of the KV.
    """
    assert max_splits >= 2
    num_partials = max_rows * num_heads * max_splits
    return DecodeScratch(
        partials=torch.empty(num_partials * head_dim, dtype=torch.float32, device=device),
        log_sums=torch.empty(num_partials, dtype=torch.float32, device=device),
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
        split_tokens: a split's size, a multiple of the tuning's tile. A sequence's result then
            depends on no other sequence. None cuts the batch into equal parts, which is quicker.
        tuning: None for the defaults.
        use_pdl: whether the launch may begin before the kernel ahead of it has ended (sm_90).
            Lengths and tables must not be that kernel's doing.
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
    max_splits, least_tiles = scratch.max_splits, tuning.least_tiles
    if split_tokens is None:
        max_splits = min(MAX_BALANCED_SPLITS, max_splits * scratch.max_rows // num_rows)
    else:
        assert split_tokens % tuning.tile_tokens == 0
        least_tiles = split_tokens // tuning.tile_tokens
    num_units = batch * num_kv_heads * triton.cdiv(rows_per_head, rows)
    num_programs = min(_most_programs(keys_SJD, rows, tuning), num_units * max_splits)
    merge_rows = (
        1 if num_rows * num_heads <= 1024 else min(4, triton.next_power_of_2(rows_per_head))
    )
    shared = {
        "J": num_kv_heads,
        "GT": rows_per_head,
        "T": queries_per_sequence,
        "D": head_dim,
        "D_PAD": triton.next_power_of_2(head_dim),
        "ROWS": rows,
        "BATCH_PAD": max(16, triton.next_power_of_2(batch)),
        "TILE": tuning.tile_tokens,
        "WINDOW": window,
        "IS_BALANCED": split_tokens is None,
        "USE_PDL": use_pdl,
        "launch_pdl": use_pdl,
    }
    _decode_kernel[(num_programs,)](
        q_MHD,
        keys_SJD,
        values_SJD,
        block_tables,
        lengths,
        out_MHD,
        scratch.partials,
        scratch.log_sums,
        q_MHD.stride(0),
        keys_SJD.stride(0),
        block_tables.stride(0),
        out_MHD.stride(0),
        batch,
        least_tiles,
        max_splits,
        scale * LOG2_E,
        BLOCK_SIZE=block_size,
        SOFT_CAP=None if soft_cap is None else soft_cap * LOG2_E,
        PREFETCH=tuning.prefetched_tiles * tuning.tile_tokens,
        num_warps=tuning.num_warps * (rows // 16),
        num_stages=tuning.num_stages,
        **shared,
    )
    merge_pieces_kernel[(batch, num_kv_heads, triton.cdiv(rows_per_head, merge_rows))](
        lengths,
        scratch.partials,
        scratch.log_sums,
        out_MHD,
        out_MHD.stride(0),
        batch,
        num_programs,
        least_tiles,
        max_splits,
        MERGE_ROWS=merge_rows,
        MERGE_SPLITS=64 // merge_rows,
        num_warps=4,
        **shared,
    )


def _most_programs(keys_SJD: Tensor, rows: int, tuning: DecodeTuning) -> int:
    """Returns how many programs run at a time."""
    if keys_SJD.device.type == "cpu":
        return CPU_PROGRAMS
    properties = torch.cuda.get_device_properties(keys_SJD.device)
    row_bytes = triton.next_power_of_2(keys_SJD.shape[2]) * keys_SJD.dtype.itemsize
    num_rows = 2 * tuning.tile_tokens * max(1, tuning.num_stages - 1) + rows
    shared_bytes = row_bytes * num_rows + SHARED_BYTES_PER_PROGRAM
    room = int(properties.shared_memory_per_multiprocessor) // shared_bytes
    return int(properties.multi_processor_count) * max(1, min(tuning.programs_per_sm, room))


@triton.jit(do_not_specialize=["table_stride", "batch", "least_tiles", "max_splits"])
def _decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    partials_ptr,
    log_sums_ptr,
    q_stride,
    kv_stride,
    table_stride,
    out_stride,
    batch,
    least_tiles,
    max_splits,
    scale,
    J: tl.constexpr,
    GT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_BALANCED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    GROUPS: tl.constexpr = (GT + ROWS - 1) // ROWS
    HEADS: tl.constexpr = J * GROUPS
    offs_b = tl.arange(0, BATCH_PAD)
    all_tiles = count_tiles(lengths_ptr, batch, T, TILE, WINDOW, BATCH_PAD)
    ends, share, place, stop = _deal_out(all_tiles, least_tiles, HEADS, max_splits, IS_BALANCED)
    is_first = True
    while place < stop:
        sequence = tl.sum((ends <= place).to(tl.int32), 0)
        length = tl.load(lengths_ptr + sequence)
        origin = first_token(length, T, TILE, WINDOW)
        tiles = tl.cdiv(length - origin, TILE)
        inside = place - tl.max(tl.where(offs_b < sequence, ends, 0), 0)
        unit, first_tile, num_tiles, piece, num_pieces, next_place = _find_piece(
            place, inside, stop, tiles, share, HEADS, max_splits, IS_BALANCED
        )
        start = origin + first_tile * TILE
        end = tl.minimum(start + num_tiles * TILE, length)
        head = unit // GROUPS
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
        blocks = load_blocks(table_ptr, start, end, BLOCK_SIZE, TILE)
        # Lengths and tables were written kernels ago; queries and this step's KV were not.
        if USE_PDL:
            if is_first:
                for tile in range(start, tl.minimum(start + PREFETCH, end), TILE):
                    some = load_blocks(table_ptr, tile, end, BLOCK_SIZE, TILE)
                    offsets = find_slots(some, tile, BLOCK_SIZE, TILE) * kv_stride + head * D
                    prefetch_rows(keys_ptr + offsets, D)
                    prefetch_rows(values_ptr + offsets, D)
            gdc_wait()
            gdc_launch_dependents()
            is_first = False

        rows = unit % GROUPS * ROWS + tl.arange(0, ROWS)
        offs_d = tl.arange(0, D_PAD)
        row_mask = (rows < GT)[:, None] & (offs_d < D)[None, :]
        q_offsets = _row_offsets(sequence, head, rows, offs_d, q_stride, GT, T, D)
        q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
        top, total, acc = _attend(
            q,
            keys_ptr + head * D,
            values_ptr + head * D,
            table_ptr,
            blocks,
            start,
            end,
            length - (T - 1) + rows // (GT // T),
            kv_stride,
            scale,
            T,
            D,
            D_PAD,
            ROWS,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            SOFT_CAP,
        )
        total = tl.where(total > 0.0, total, 1.0)
        out = acc / total[:, None]
        if num_pieces == 1:
            out_offsets = _row_offsets(sequence, head, rows, offs_d, out_stride, GT, T, D)
            tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
        else:
            part = ((sequence * J + head).to(tl.int64) * max_splits + piece) * GT + rows
            tl.store(partials_ptr + part[:, None] * D + offs_d[None, :], out, mask=row_mask)
            tl.store(log_sums_ptr + part, top + tl.log2(total), mask=rows < GT)
        place = next_place
    # A program without work must wait as well: the kernel behind takes it for all before it.
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _deal_out(all_tiles, least_tiles, HEADS: tl.constexpr, max_splits, IS_BALANCED: tl.constexpr):
    """Returns where each sequence's places end, the size of a share, and the program's places.

    A place is a tile of some sequence and head, or a split of a fixed size.
    """
    if IS_BALANCED:
        share = share_tiles(all_tiles, tl.num_programs(0), least_tiles, HEADS, max_splits)
        ends = tl.cumsum(all_tiles, 0) * HEADS
        place = tl.program_id(0) * share
        return ends, share, place, tl.minimum(place + share, tl.max(ends, 0))
    else:
        num_splits = tl.cdiv(all_tiles, split_tiles(all_tiles, least_tiles, max_splits))
        ends = tl.cumsum(num_splits, 0) * HEADS
        return ends, least_tiles, tl.program_id(0), tl.max(ends, 0)


@triton.jit
def _find_piece(
    place,
    inside,
    stop,
    tiles,
    share,
    HEADS: tl.constexpr,
    max_splits,
    IS_BALANCED: tl.constexpr,
):
    """Returns what lies at a place, `inside` of its sequence's places.

    That is: head and row group, first tile, number of tiles, the piece's number, the number of
    pieces of this sequence and head, and the program's next place.
    """
    if IS_BALANCED:
        first_tile = inside % tiles
        num_tiles = tl.minimum(tiles - first_tile, stop - place)
        unit_start = place - first_tile
        piece = tl.program_id(0) - unit_start // share
        num_pieces = count_pieces(unit_start, tiles, share)
        return inside // tiles, first_tile, num_tiles, piece, num_pieces, place + num_tiles
    else:
        # Heads of one split run side by side: they lie in the same blocks.
        piece = inside // HEADS
        num_tiles = split_tiles(tiles, share, max_splits)
        num_pieces = tl.cdiv(tiles, num_tiles)
        next_place = place + tl.num_programs(0)
        return inside % HEADS, piece * num_tiles, num_tiles, piece, num_pieces, next_place


@triton.jit
def _row_offsets(
    sequence,
    head,
    rows,
    offs_d,
    stride,
    GT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Returns where the rows of a KV head lie in queries or outputs."""
    G: tl.constexpr = GT // T
    index = (sequence * T + rows // G).to(tl.int64)
    return index[:, None] * stride + (head * G + rows % G)[:, None] * D + offs_d[None, :]


@triton.jit
def _attend(
    q,
    keys_ptr,
    values_ptr,
    table_ptr,
    blocks,
    start,
    end,
    limits,
    kv_stride,
    scale,
    T: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Returns each row's maximum, sum and weighted values over a split's tokens.

    A row sees tokens before its limit. `blocks` are those of the first tile's tokens.
    """
    offs_d = tl.arange(0, D_PAD)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for tile in range(start, end, TILE):
        offs_n = tile + tl.arange(0, TILE)
        exists = offs_n < end
        slots = find_slots(blocks, tile, BLOCK_SIZE, TILE)
        offsets = slots[:, None] * kv_stride + offs_d[None, :]
        kv_mask = exists[:, None] & (offs_d < D)[None, :]
        # One tile ahead: a load that waits for another would take a stage of its own.
        blocks = load_blocks(table_ptr, tile + TILE, end, BLOCK_SIZE, TILE)
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
    return top, total, acc
