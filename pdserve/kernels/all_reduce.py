"""Sums and gathers over the GPUs of one node, in one kernel each, the sum with residual and norm.

Every rank has a ring of three slots that all others can write to. A round sends a rank's values
into the others' rings and polls its own. Data are their own flags, as in NCCL's LL protocols and
TensorRT-LLM's Lamport kernels: a slot is filled with EMPTY, a bit pattern that no sender sends, and
a value has arrived once it is something else. So there are no fences, and one crossing of the
link is all the latency there is.

    round k:  write to the peers' slot k % 3, poll the own one, clear slot (k - 1) % 3

A peer writes to slot (k - 1) % 3 again in round k + 2. It starts that when it has all of this
rank's values of round k + 1, which are sent when kernel k, and so the clearing, has ended.

Sums are added in the order of the ranks, of values rounded before they are sent: all ranks get the
same bits, and a row gets the same ones whatever else is in the batch.

No program waits for one that may not run yet: there are never more than fit on a device at once.
Polling ends after `max_polls`: then the ring has failed for good, every later round ends at once,
and the host is told (`state`).

Letters: M rows, E hidden, S partial sums of a product, R rows, N columns of one rank.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.launch import launch_options

NUM_SLOTS = tl.constexpr(3)
EMPTY_WORD = tl.constexpr(-0x7FFF8000)
"""0x80008000: a float32 next to nothing, or two of 16 bits that are minus zero."""
EMPTY_HALF = tl.constexpr(-0x8000)
SLOT = tl.constexpr(0)
DIRTY = tl.constexpr(1)
ARRIVED = tl.constexpr(2)
FAILED = tl.constexpr(3)
NUM_STATE_WORDS = 4
"""Slot of the next round; words of each sender to clear; programs that have ended; has failed."""
MAX_RANKS = 8
_WORD = torch.int32
_HALF = torch.int16
GATHER_BLOCK = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRing:
    """One rank's view of all rings. Rounds are the same on all ranks, in the same order."""

    rank: int
    rings: tuple[Tensor, ...]
    """int32 [3, other ranks, words] of each rank, its own among them, all EMPTY_WORD at first."""
    state: Tensor
    """int32 [4], zero at first."""
    max_programs: int
    """So many fit on the device at once."""
    max_polls: int
    """About half a microsecond each."""

    @property
    def num_ranks(self) -> int:
        """How many ranks share the ring."""
        return len(self.rings)

    @property
    def words(self) -> int:
        """What a rank can send in one round, in units of four bytes."""
        return self.rings[0].shape[2]

    @property
    def failed(self) -> Tensor:
        """int32 [1] on the device: not 0 once a rank waited in vain."""
        return self.state[FAILED.value :]


@triton.jit
def pack_values(values, dtype: tl.constexpr, IS_NARROW: tl.constexpr):
    """Returns rounded values as integers, none of them EMPTY: minus zero becomes zero."""
    if IS_NARROW:
        bits = values.to(dtype).to(tl.int16, bitcast=True)
        return tl.where(bits == EMPTY_HALF, tl.zeros_like(bits), bits)
    else:
        bits = values.to(tl.float32).to(tl.int32, bitcast=True)
        return tl.where(bits == EMPTY_WORD, tl.zeros_like(bits), bits)


@triton.jit
def find_part(
    slot, sender_values, SENDER: tl.constexpr, OWNER: tl.constexpr, NUM_RANKS: tl.constexpr
):
    """Returns where a sender's part of a slot begins in the ring of another rank."""
    place: tl.constexpr = SENDER - 1 if SENDER > OWNER else SENDER
    return (slot * (NUM_RANKS - 1) + place).to(tl.int64) * sender_values


@triton.jit
def send_values(
    rings, bits, slot, sender_values, places, mask, RANK: tl.constexpr, NUM_RANKS: tl.constexpr
):
    """Writes values into the others' rings."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            part = find_part(slot, sender_values, RANK, peer, NUM_RANKS)
            tl.store(rings[peer] + part + places, bits, mask=mask)


@triton.jit
def receive_values(
    ring_ptr,
    slot,
    sender_values,
    places,
    mask,
    state_ptr,
    max_polls,
    SENDER: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Waits for what a rank sends; what is missing in the end is EMPTY."""
    at = ring_ptr + find_part(slot, sender_values, SENDER, RANK, NUM_RANKS) + places
    bits = tl.load(at, mask=mask, other=0, volatile=True)
    num_missing = tl.max((bits == EMPTY).to(tl.int32), axis=0)
    num_polls = 0
    while (num_missing > 0) & (num_polls < max_polls):
        bits = tl.load(at, mask=mask, other=0, volatile=True)
        num_missing = tl.max((bits == EMPTY).to(tl.int32), axis=0)
        num_polls += 1
    if num_missing > 0:
        tl.store(state_ptr + FAILED, 1)
    return bits


@triton.jit
def end_round(
    ring_ptr,
    state_ptr,
    slot,
    sender_values,
    sent_words,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    EMPTY: tl.constexpr,
    PER_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Clears what the round before left; the last program moves on to the next slot."""
    num_dirty = tl.load(state_ptr + DIRTY) * PER_WORD
    old = (slot + NUM_SLOTS - 1) % NUM_SLOTS
    empty = tl.full([BLOCK], EMPTY, ring_ptr.dtype.element_ty)
    for sender in tl.static_range(NUM_RANKS):
        if sender != RANK:
            base = find_part(old, sender_values, sender, RANK, NUM_RANKS)
            for start in range(tl.program_id(0) * BLOCK, num_dirty, tl.num_programs(0) * BLOCK):
                places = start + tl.arange(0, BLOCK)
                tl.store(ring_ptr + base + places, empty, mask=places < num_dirty)
    tl.debug_barrier()
    arrived = tl.atomic_add(state_ptr + ARRIVED, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state_ptr + DIRTY, sent_words)
        tl.store(state_ptr + SLOT, (slot + 1) % NUM_SLOTS)
        tl.store(state_ptr + ARRIVED, 0)


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
    at = x_ptr + row * x_stride_m + columns
    total = tl.load(at, mask=mask, other=0).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(at + split * x_stride_s, mask=mask, other=0).to(tl.float32)
    bits = pack_values(total, DTYPE, IS_NARROW)
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
            bits = receive_values(
                rings[RANK],
                slot,
                sender_values,
                row * num_columns + columns,
                is_inside,
                state_ptr,
                max_polls,
                sender,
                RANK,
                NUM_RANKS,
                EMPTY,
            )
        added += bits.to(DTYPE, bitcast=True).to(tl.float32)
    if HAS_RESIDUAL:
        added = residual + added
    rounded = added.to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, rounded, mask=is_inside)
    # The norm of what was stored, so that a later reader of the residual sees the same.
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / num_columns + epsilon)
    out = total * scale * weight
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=is_inside)


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
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_E)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    slot = tl.load(state_ptr + SLOT)
    max_polls = tl.where(tl.load(state_ptr + FAILED) > 0, 0, max_polls)
    own = send_row(
        x_ptr,
        rings,
        row,
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
    if HAS_MORE_ROWS:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
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
            own = following
    else:
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
        _views(ring, is_narrow=is_narrow),
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


@triton.jit(do_not_specialize=["num_rows", "num_columns", "max_columns", "least_columns"])
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
                bits = receive_values(
                    rings[RANK],
                    slot,
                    sender_values,
                    row * max_columns + columns,
                    is_sent,
                    state_ptr,
                    max_polls,
                    sender,
                    RANK,
                    NUM_RANKS,
                    EMPTY_WORD,
                )
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


def _views(ring: PeerRing, *, is_narrow: bool) -> tuple[Tensor, ...]:
    return tuple(one.view(_HALF) for one in ring.rings) if is_narrow else ring.rings
