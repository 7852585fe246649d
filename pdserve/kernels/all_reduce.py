"""Sums over the GPUs of one node, with residual and norm, in one kernel: see `peer_ring`.

Sums are added in the order of the ranks, of values rounded before they are sent: all ranks get the
same bits, and a row gets the same ones whatever else is in the batch.

Letters: M rows, E hidden, S partial sums of a product.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.launch import launch_options
from pdserve.kernels.peer_ring import (
    EMPTY_HALF,
    EMPTY_WORD,
    FAILED,
    SLOT,
    PeerRing,
    end_round,
    find_part,
    pack_values,
    receive_values,
    send_values,
)


@triton.jit
def sum_parts(
    x_ptr,
    row,
    mask,
    x_stride_s,
    x_stride_m,
    NUM_SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_NARROW: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Returns a row of this rank as it is sent."""
    at = x_ptr + row * x_stride_m + tl.arange(0, BLOCK_E)
    total = tl.load(at, mask=mask, other=0).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(at + split * x_stride_s, mask=mask, other=0).to(tl.float32)
    return pack_values(total, DTYPE, IS_NARROW)


@triton.jit
def norm_row(total, residual_at, weight, out_at, is_inside, num_columns, epsilon):
    """Stores a row of the residual stream and its norm."""
    rounded = total.to(residual_at.dtype.element_ty)
    tl.store(residual_at, rounded, mask=is_inside)
    # The norm of what was stored, so that a later reader of the residual sees the same.
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / num_columns + epsilon)
    out = total * scale * weight
    tl.store(out_at, out.to(out_at.dtype.element_ty), mask=is_inside)


@triton.jit
def send_row(
    x_ptr,
    rings,
    row,
    slot,
    sender_values,
    x_stride_s,
    x_stride_m,
    num_rows,
    num_columns,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_NARROW: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sums a row of this rank up and sends it; returns what was sent."""
    columns = tl.arange(0, BLOCK_E)
    mask = (columns < num_columns) & (row < num_rows)
    row = tl.cast(row, tl.int64)
    bits = sum_parts(
        x_ptr, row, mask, x_stride_s, x_stride_m, NUM_SPLITS, DTYPE, IS_NARROW, BLOCK_E
    )
    places = row * num_columns + columns
    send_values(rings, bits, slot, sender_values, places, mask, RANK, NUM_RANKS)
    return bits


@triton.jit
def receive_row(
    own,
    rings,
    residual_ptr,
    weight,
    out_ptr,
    state_ptr,
    row,
    slot,
    sender_values,
    residual_stride,
    out_stride,
    num_columns,
    epsilon,
    max_polls,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Adds the ranks' rows to the residual and norms the sum."""
    row = tl.cast(row, tl.int64)
    columns = tl.arange(0, BLOCK_E)
    is_inside = columns < num_columns
    residual_at = residual_ptr + row * residual_stride + columns
    if HAS_RESIDUAL:
        residual = tl.load(residual_at, mask=is_inside, other=0).to(tl.float32)
    added = tl.zeros([BLOCK_E], dtype=tl.float32)
    for sender in tl.static_range(NUM_RANKS):
        if sender == RANK:
            bits = own
        else:
            part = find_part(slot, sender_values, sender, RANK, NUM_RANKS)
            at = rings[RANK] + part + row * num_columns + columns
            bits = receive_values(at, is_inside, state_ptr, max_polls, EMPTY)
        added += bits.to(DTYPE, bitcast=True).to(tl.float32)
    if HAS_RESIDUAL:
        added = residual + added
    out_at = out_ptr + row * out_stride + columns
    norm_row(added, residual_at, weight, out_at, is_inside, num_columns, epsilon)


@triton.jit(do_not_specialize=["num_rows"])
def ranks_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    rings,
    state_ptr,
    x_stride_s,
    x_stride_m,
    residual_stride,
    out_stride,
    num_rows,
    num_columns,
    sender_values,
    epsilon,
    max_polls,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_MORE_ROWS: tl.constexpr,
    IS_NARROW: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A row a program, or rows program_id, program_id + programs, ... of many."""
    if USE_PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    EMPTY: tl.constexpr = EMPTY_HALF if IS_NARROW else EMPTY_WORD
    PER_WORD: tl.constexpr = 2 if IS_NARROW else 1
    columns = tl.arange(0, BLOCK_E)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    slot = tl.load(state_ptr + SLOT)
    max_polls = tl.where(tl.load(state_ptr + FAILED) > 0, 0, max_polls)
    own = send_row(
        x_ptr,
        rings,
        tl.program_id(0),
        slot,
        sender_values,
        x_stride_s,
        x_stride_m,
        num_rows,
        num_columns,
        RANK,
        NUM_RANKS,
        NUM_SPLITS,
        DTYPE,
        IS_NARROW,
        BLOCK_E,
    )
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        if HAS_MORE_ROWS:
            # The link is kept busy while this row is on its way.
            following = send_row(
                x_ptr,
                rings,
                row + tl.num_programs(0),
                slot,
                sender_values,
                x_stride_s,
                x_stride_m,
                num_rows,
                num_columns,
                RANK,
                NUM_RANKS,
                NUM_SPLITS,
                DTYPE,
                IS_NARROW,
                BLOCK_E,
            )
        receive_row(
            own,
            rings,
            residual_ptr,
            weight,
            out_ptr,
            state_ptr,
            row,
            slot,
            sender_values,
            residual_stride,
            out_stride,
            num_columns,
            epsilon,
            max_polls,
            RANK,
            NUM_RANKS,
            HAS_RESIDUAL,
            DTYPE,
            EMPTY,
            BLOCK_E,
        )
        if HAS_MORE_ROWS:
            own = following
    sent_words = (num_rows * num_columns + PER_WORD - 1) // PER_WORD
    end_round(
        rings[RANK],
        state_ptr,
        slot,
        sender_values,
        sent_words,
        RANK,
        NUM_RANKS,
        EMPTY,
        PER_WORD,
        BLOCK_E,
    )


def add_norm_over_ranks(
    x_SME: Tensor,
    residual_ME: Tensor,
    weight_E: Tensor,
    out_ME: Tensor,
    ring: PeerRing,
    *,
    epsilon: float,
    has_residual: bool = True,
    use_pdl: bool = False,
) -> None:
    """Adds the product that the ranks have parts of to the residual stream, and norms the sum.

    Args:
        x_SME: this rank's partial sums, any float dtype. What the ranks add is their sum, rounded
            to the residual's dtype.
        residual_ME: read, and overwritten with the sum.
        weight_E: the gain.
        out_ME: the normed rows, contiguous within a row.
        ring: must have room for M x E values of the residual's dtype.
        epsilon: added to the mean square.
        has_residual: without it the residual is not read: the sum is all there is.
        use_pdl: launch while the kernel before still runs.
    """
    num_rows, num_columns = out_ME.shape
    assert x_SME.stride(-1) == residual_ME.stride(-1) == out_ME.stride(-1) == 1
    if num_rows == 0:
        return
    is_narrow = residual_ME.dtype.itemsize == 2
    assert is_narrow or residual_ME.dtype.itemsize == 4
    per_word = 2 if is_narrow else 1
    assert num_rows * num_columns <= ring.words * per_word
    block = triton.next_power_of_2(num_columns)
    num_programs = min(num_rows, ring.max_programs)
    ranks_norm_kernel[(num_programs,)](
        x_SME,
        residual_ME,
        weight_E,
        out_ME,
        ring.halves if is_narrow else ring.rings,
        ring.state,
        x_SME.stride(0),
        x_SME.stride(1),
        residual_ME.stride(0),
        out_ME.stride(0),
        num_rows,
        num_columns,
        ring.words * per_word,
        epsilon,
        ring.max_polls,
        RANK=ring.rank,
        NUM_RANKS=ring.num_ranks,
        NUM_SPLITS=x_SME.shape[0],
        HAS_RESIDUAL=has_residual,
        HAS_MORE_ROWS=num_rows > num_programs,
        IS_NARROW=is_narrow,
        BLOCK_E=block,
        USE_PDL=use_pdl,
        **launch_options(min(max(block // 512, 1), 16), use_pdl=use_pdl),
    )
