"""Adds up the pieces that a sequence's decode attention was computed in.

Letters as in `pdserve.kernels.decode_attention`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.decode_shares import count_pieces, count_tiles, share_tiles, split_tiles


@triton.jit(do_not_specialize=["batch", "num_teams", "least_tiles", "max_splits"])
def merge_pieces_kernel(
    lengths_ptr,
    partials_ptr,
    log_sums_ptr,
    out_ptr,
    out_stride,
    batch,
    num_teams,
    least_tiles,
    max_splits,
    J: tl.constexpr,
    GT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_BALANCED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Merges some rows of one sequence and KV head; rows of a single piece are already done."""
    G: tl.constexpr = GT // T
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.program_id(2) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    all_tiles = count_tiles(lengths_ptr, batch, T, TILE, WINDOW, BATCH_PAD)
    offs_b = tl.arange(0, BATCH_PAD)
    tiles = tl.sum(tl.where(offs_b == sequence, all_tiles, 0), 0)
    if IS_BALANCED:
        share = share_tiles(all_tiles, num_teams, least_tiles, max_splits)
        start = tl.sum(tl.where(offs_b < sequence, all_tiles, 0), 0)
        num_pieces = count_pieces(start, tiles, share)
    else:
        num_pieces = tl.cdiv(tiles, split_tiles(tiles, least_tiles, max_splits))
    # The kernel behind may begin at once: it waits for this one, which waits for the pieces.
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (num_pieces < 2) | (tiles == 0):
        return

    offs_d = tl.arange(0, D_PAD)
    place = (sequence * J + head).to(tl.int64) * (max_splits * GT)
    top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, D_PAD], tl.float32)
    for first in range(0, num_pieces, MERGE_SPLITS):
        pieces = first + tl.arange(0, MERGE_SPLITS)
        places = place + pieces[:, None] * GT + rows[None, :]
        exists = (pieces < num_pieces)[:, None] & (rows < GT)[None, :]
        log_sums = tl.load(log_sums_ptr + places, mask=exists, other=float("-inf"))
        parts = tl.load(
            partials_ptr + places[:, :, None] * D + offs_d[None, None, :],
            mask=exists[:, :, None] & (offs_d < D)[None, None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(log_sums, 0))
        # A row of padding, or a query that sees nothing of these pieces.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(log_sums - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    index = (sequence * T + rows // G).to(tl.int64)
    columns = (head * G + rows % G)[:, None] * D + offs_d[None, :]
    tl.store(
        out_ptr + index[:, None] * out_stride + columns,
        out.to(out_ptr.dtype.element_ty),
        mask=(rows < GT)[:, None] & (offs_d < D)[None, :],
    )
