"""Puts the columns of the GPUs of one node side by side, on all of them: see `peer_ring`.

Letters: R rows, N columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.launch import launch_options
from pdserve.kernels.peer_ring import (
    EMPTY_WORD,
    FAILED,
    SLOT,
    PeerRing,
    end_round,
    find_part,
    receive_values,
    send_values,
)

GATHER_BLOCK = 2048
_WORD = torch.int32


@triton.jit
def send_block(
    x_ptr,
    rings,
    unit,
    slot,
    sender_values,
    x_stride,
    num_units,
    num_blocks,
    num_columns,
    max_columns,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sends a piece of a row; returns what was sent."""
    row = tl.cast(unit // num_blocks, tl.int64)
    columns = unit % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = (columns < num_columns) & (unit < num_units)
    bits = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0)
    bits = tl.where(bits == EMPTY_WORD, tl.zeros_like(bits), bits)
    places = row * max_columns + columns
    send_values(rings, bits, slot, sender_values, places, mask, RANK, NUM_RANKS)
    return bits


@triton.jit(
    # num_longer: a 1 would be a Python number, which has no `to`
    do_not_specialize=["num_rows", "num_columns", "max_columns", "least_columns", "num_longer"]
)
def gather_kernel(
    x_ptr,
    out_ptr,
    rings,
    state_ptr,
    x_stride,
    out_stride,
    num_rows,
    num_columns,
    max_columns,
    least_columns,
    num_longer,
    sender_values,
    max_polls,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Pieces program_id, program_id + programs, ... of rows."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(state_ptr + SLOT)
    max_polls = tl.where(tl.load(state_ptr + FAILED) > 0, 0, max_polls)
    num_blocks = (max_columns + BLOCK - 1) // BLOCK
    num_units = num_rows * num_blocks
    own = send_block(
        x_ptr,
        rings,
        tl.program_id(0),
        slot,
        sender_values,
        x_stride,
        num_units,
        num_blocks,
        num_columns,
        max_columns,
        RANK,
        NUM_RANKS,
        BLOCK,
    )
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        following = send_block(
            x_ptr,
            rings,
            unit + tl.num_programs(0),
            slot,
            sender_values,
            x_stride,
            num_units,
            num_blocks,
            num_columns,
            max_columns,
            RANK,
            NUM_RANKS,
            BLOCK,
        )
        row = tl.cast(unit // num_blocks, tl.int64)
        columns = unit % num_blocks * BLOCK + tl.arange(0, BLOCK)
        for sender in tl.static_range(NUM_RANKS):
            is_sent = columns < least_columns + (sender < num_longer).to(tl.int32)
            if sender == RANK:
                bits = own
            else:
                part = find_part(slot, sender_values, sender, RANK, NUM_RANKS)
                at = rings[RANK] + part + row * max_columns + columns
                bits = receive_values(at, is_sent, state_ptr, max_polls, EMPTY_WORD)
            first = sender * least_columns + tl.minimum(sender, num_longer)
            tl.store(out_ptr + row * out_stride + first + columns, bits, mask=is_sent)
        own = following
    end_round(
        rings[RANK],
        state_ptr,
        slot,
        sender_values,
        num_rows * max_columns,
        RANK,
        NUM_RANKS,
        EMPTY_WORD,
        1,
        BLOCK,
    )


def gather_over_ranks(
    x_RN: Tensor, out_RN: Tensor, ring: PeerRing, *, use_pdl: bool = False
) -> None:
    """Puts the ranks' columns side by side, on every rank; the first ranks may have one more.

    Args:
        x_RN: float32 or int32. Minus zero and the like may arrive as zero: see EMPTY_WORD.
        out_RN: likewise, as many columns as all ranks have together; contiguous within a row.
        ring: rows go over it as many at a time as there is room for.
        use_pdl: launch while the kernel before still runs.
    """
    num_ranks, total = ring.num_ranks, out_RN.shape[1]
    assert x_RN.dtype.itemsize == out_RN.dtype.itemsize == 4
    assert x_RN.stride(1) == out_RN.stride(1) == 1
    least, num_longer = divmod(total, num_ranks)
    assert x_RN.shape[1] == least + (ring.rank < num_longer)
    # Whole pieces of 16 bytes, so that rows start on them.
    max_columns = -(-(least + (num_longer > 0)) // 4) * 4
    rows_at_once = ring.words // max_columns
    assert rows_at_once > 0
    x, out = x_RN.view(_WORD), out_RN.view(_WORD)
    for start in range(0, x.shape[0], rows_at_once):
        part = x[start : start + rows_at_once]
        num_units = part.shape[0] * triton.cdiv(max_columns, GATHER_BLOCK)
        gather_kernel[(min(num_units, ring.max_programs),)](
            part,
            out[start:],
            ring.rings,
            ring.state,
            x.stride(0),
            out.stride(0),
            part.shape[0],
            x.shape[1],
            max_columns,
            least,
            num_longer,
            ring.words,
            ring.max_polls,
            RANK=ring.rank,
            NUM_RANKS=num_ranks,
            BLOCK=GATHER_BLOCK,
            USE_PDL=use_pdl,
            **launch_options(8, use_pdl=use_pdl),
        )
