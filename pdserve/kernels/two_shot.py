"""Sums of many rows over three GPUs and more, with residual and norm: each row is summed by one.

    every rank sends each row to its owner -> owners send the sums to all -> residual and norm

A row crosses links 2 (n - 1) / n times instead of n - 1, but two times one after the other, and the
sum is rounded before it is added to the residual. All ranks get the same bits. See `peer_ring`.

Letters: M rows, E hidden, S partial sums of a product.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.all_reduce import norm_row, sum_parts
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
def send_to_owner(
    rings,
    bits,
    owner,
    slot,
    sender_values,
    places,
    is_inside,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """Writes a row into the ring of the rank that sums it up."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            part = find_part(slot, sender_values, RANK, peer, NUM_RANKS)
            tl.store(rings[peer] + part + places, bits, mask=is_inside & (owner == peer))


@triton.jit
def sum_row(
    x_ptr,
    ring_ptr,
    row,
    slot,
    sender_values,
    places,
    is_inside,
    state_ptr,
    x_stride_s,
    x_stride_m,
    max_polls,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_NARROW: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Returns the sum of all ranks' parts of a row, as it is sent."""
    total = tl.zeros([BLOCK_E], dtype=tl.float32)
    for sender in tl.static_range(NUM_RANKS):
        if sender == RANK:
            bits = sum_parts(
                x_ptr,
                row,
                is_inside,
                x_stride_s,
                x_stride_m,
                NUM_SPLITS,
                DTYPE,
                IS_NARROW,
                BLOCK_E,
            )
        else:
            part = find_part(slot, sender_values, sender, RANK, NUM_RANKS)
            bits = receive_values(ring_ptr + part + places, is_inside, state_ptr, max_polls, EMPTY)
        total += bits.to(DTYPE, bitcast=True).to(tl.float32)
    return pack_values(total, DTYPE, IS_NARROW)


@triton.jit
def add_sum(
    bits,
    residual_ptr,
    weight,
    out_ptr,
    row,
    residual_stride,
    out_stride,
    is_inside,
    num_columns,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Adds a sum to the residual and norms that."""
    columns = tl.arange(0, BLOCK_E)
    residual_at = residual_ptr + row * residual_stride + columns
    total = bits.to(DTYPE, bitcast=True).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_at, mask=is_inside, other=0).to(tl.float32)
    out_at = out_ptr + row * out_stride + columns
    norm_row(total, residual_at, weight, out_at, is_inside, num_columns, epsilon)


@triton.jit(do_not_specialize=["num_rows"])
def two_shot_norm_kernel(
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
    IS_NARROW: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Rows program_id, program_id + programs, ... in three passes."""
    if USE_PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    EMPTY: tl.constexpr = EMPTY_HALF if IS_NARROW else EMPTY_WORD
    PER_WORD: tl.constexpr = 2 if IS_NARROW else 1
    columns = tl.arange(0, BLOCK_E)
    is_inside = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    slot = tl.load(state_ptr + SLOT)
    max_polls = tl.where(tl.load(state_ptr + FAILED) > 0, 0, max_polls)
    first = (num_rows * RANK + NUM_RANKS - 1) // NUM_RANKS
    stop = (num_rows * (RANK + 1) + NUM_RANKS - 1) // NUM_RANKS
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        owner = row * NUM_RANKS // num_rows
        if owner != RANK:
            bits = sum_parts(
                x_ptr,
                row,
                is_inside,
                x_stride_s,
                x_stride_m,
                NUM_SPLITS,
                DTYPE,
                IS_NARROW,
                BLOCK_E,
            )
            places = row * num_columns + columns
            send_to_owner(
                rings, bits, owner, slot, sender_values, places, is_inside, RANK, NUM_RANKS
            )
    # Row after row in the same program on all ranks: none waits for another program.
    num_programs = tl.num_programs(0)
    begin = first + (tl.program_id(0) + num_programs - first % num_programs) % num_programs
    for index in range(begin, stop, num_programs):
        row = tl.cast(index, tl.int64)
        places = row * num_columns + columns
        bits = sum_row(
            x_ptr,
            rings[RANK],
            row,
            slot,
            sender_values,
            places,
            is_inside,
            state_ptr,
            x_stride_s,
            x_stride_m,
            max_polls,
            RANK,
            NUM_RANKS,
            NUM_SPLITS,
            DTYPE,
            IS_NARROW,
            EMPTY,
            BLOCK_E,
        )
        send_values(rings, bits, slot, sender_values, places, is_inside, RANK, NUM_RANKS)
        add_sum(
            bits,
            residual_ptr,
            weight,
            out_ptr,
            row,
            residual_stride,
            out_stride,
            is_inside,
            num_columns,
            epsilon,
            HAS_RESIDUAL,
            DTYPE,
            BLOCK_E,
        )
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        owner = row * NUM_RANKS // num_rows
        if owner != RANK:
            place = slot * (NUM_RANKS - 1) + owner - (owner > RANK).to(tl.int64)
            at = rings[RANK] + place * sender_values + row * num_columns + columns
            bits = receive_values(at, is_inside, state_ptr, max_polls, EMPTY)
            add_sum(
                bits,
                residual_ptr,
                weight,
                out_ptr,
                row,
                residual_stride,
                out_stride,
                is_inside,
                num_columns,
                epsilon,
                HAS_RESIDUAL,
                DTYPE,
                BLOCK_E,
            )
    end_round(
        rings[RANK],
        state_ptr,
        slot,
        sender_values,
        (num_rows * num_columns + PER_WORD - 1) // PER_WORD,
        RANK,
        NUM_RANKS,
        EMPTY,
        PER_WORD,
        BLOCK_E,
    )


def add_norm_in_two_shots(
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
    """Does what `all_reduce.add_norm_over_ranks` does, for at least as many rows as ranks."""
    num_rows, num_columns = out_ME.shape
    assert x_SME.stride(-1) == residual_ME.stride(-1) == out_ME.stride(-1) == 1
    assert num_rows >= ring.num_ranks
    is_narrow = residual_ME.dtype.itemsize == 2
    assert is_narrow or residual_ME.dtype.itemsize == 4
    per_word = 2 if is_narrow else 1
    assert num_rows * num_columns <= ring.words * per_word
    block = triton.next_power_of_2(num_columns)
    two_shot_norm_kernel[(min(num_rows, ring.max_programs),)](
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
        IS_NARROW=is_narrow,
        BLOCK_E=block,
        USE_PDL=use_pdl,
        **launch_options(min(max(block // 512, 1), 16), use_pdl=use_pdl),
    )
