"""Memory of one rank that the others of its node write to, and the steps of every exchange over it.

Every rank has a ring of three slots. A round sends a rank's values into the others' rings and polls
its own. Data are their own flags, as in NCCL's LL protocols and TensorRT-LLM's Lamport kernels: a
slot is filled with EMPTY, a bit pattern that no sender sends, and a value has arrived once it is
something else. So there are no fences, and one crossing of the link is all the latency there is.

    round k:  write to the peers' slot k % 3, poll the own one, clear slot (k - 1) % 3

A peer writes to slot (k - 1) % 3 again in round k + 2. It starts that when it has all of this
rank's values of round k + 1, which are sent when kernel k, and so the clearing, has ended.

No program waits for one that may not run yet: there are never more than fit on a device at once.
Polling ends after `max_polls`: then the ring has failed for good, every later round ends at once,
and the host is told (`state`).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRing:
    """One rank's view of all rings. Rounds are the same on all ranks, in the same order."""

    rank: int
    rings: tuple[Tensor, ...]
    """int32 [3, other ranks, words] of each rank, its own among them, all EMPTY_WORD at first."""
    halves: tuple[Tensor, ...]
    """The same, int16."""
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
def receive_values(at, mask, state_ptr, max_polls, EMPTY: tl.constexpr):
    """Waits for what a rank sends; what is missing in the end is EMPTY."""
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
