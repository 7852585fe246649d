"""The kernel of `pdserve.kernels.decode_attention`, whose letters it uses."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.block_table import find_slots, load_blocks, prefetch_rows
from pdserve.kernels.decode_shares import (
    count_pieces,
    count_tiles,
    first_token,
    share_tiles,
    split_tiles,
)


@triton.jit(do_not_specialize=["table_stride", "batch", "least_tiles", "max_splits"])
def decode_kernel(
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
    """Computes one program's pieces; `pdserve.kernels.decode_shares` says which."""
    GROUPS: tl.constexpr = (GT + ROWS - 1) // ROWS
    TEAM: tl.constexpr = J * GROUPS
    team = tl.program_id(0) // TEAM
    num_teams = tl.num_programs(0) // TEAM
    head = tl.program_id(0) % TEAM // GROUPS
    first_row = tl.program_id(0) % GROUPS * ROWS
    offs_b = tl.arange(0, BATCH_PAD)
    all_tiles = count_tiles(lengths_ptr, batch, T, TILE, WINDOW, BATCH_PAD)
    ends, share, place, stop = _deal_out(
        all_tiles, team, num_teams, least_tiles, max_splits, IS_BALANCED
    )
    is_first = True
    while place < stop:
        sequence = tl.sum((ends <= place).to(tl.int32), 0)
        length = tl.load(lengths_ptr + sequence)
        origin = first_token(length, T, TILE, WINDOW)
        tiles = tl.cdiv(length - origin, TILE)
        inside = place - tl.max(tl.where(offs_b < sequence, ends, 0), 0)
        if IS_BALANCED:
            first_tile = inside
            num_tiles = tl.minimum(tiles - inside, stop - place)
            piece = team - (place - inside) // share
            num_pieces = count_pieces(place - inside, tiles, share)
            place += num_tiles
        else:
            num_tiles = split_tiles(tiles, share, max_splits)
            first_tile = inside * num_tiles
            piece = inside
            num_pieces = tl.cdiv(tiles, num_tiles)
            place += num_teams
        start = origin + first_tile * TILE
        end = tl.minimum(start + num_tiles * TILE, length)
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

        rows = first_row + tl.arange(0, ROWS)
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
    # A program without work must wait as well: the kernel behind takes it for all before it.
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _deal_out(all_tiles, team, num_teams, least_tiles, max_splits, IS_BALANCED: tl.constexpr):
    """Returns where each sequence's places end, the size of a share, and the team's places.

    A place is a tile of some sequence, or a split of a fixed size.
    """
    if IS_BALANCED:
        share = share_tiles(all_tiles, num_teams, least_tiles, max_splits)
        ends = tl.cumsum(all_tiles, 0)
        return ends, share, team * share, tl.minimum(team * share + share, tl.max(ends, 0))
    else:
        num_splits = tl.cdiv(all_tiles, split_tiles(all_tiles, least_tiles, max_splits))
        ends = tl.cumsum(num_splits, 0)
        return ends, least_tiles, team, tl.max(ends, 0)


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
