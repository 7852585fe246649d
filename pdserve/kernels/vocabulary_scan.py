"""What one program finds out about a row in one reading of its logits.

What filters have kept so far is told by a key and an id: tokens over the key, and those at it up to
the id.
"""

import triton
import triton.language as tl

from pdserve.kernels.logits import clean, come_before, load_logits, ordered_key
from pdserve.kernels.noise import NO_ID

MAX_RANKED = tl.constexpr(256)
"""Tokens that are ranked against each other."""


@triton.jit
def measure_tokens(
    row_ptr,
    vocab_size,
    key_1,
    key_2,
    key_3,
    floor_key,
    last_id,
    row_max,
    scale,
    HAS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Returns how many tokens lie over each of three keys, and their probability mass (float64)."""
    tile_ids = tl.arange(0, BLOCK)
    counts_1 = tl.zeros([BLOCK], dtype=tl.int32)
    counts_2 = tl.zeros([BLOCK], dtype=tl.int32)
    counts_3 = tl.zeros([BLOCK], dtype=tl.int32)
    masses_1 = tl.zeros([BLOCK], dtype=tl.float32)
    masses_2 = tl.zeros([BLOCK], dtype=tl.float32)
    masses_3 = tl.zeros([BLOCK], dtype=tl.float32)
    ahead = load_logits(row_ptr, tile_ids, vocab_size)
    for tile in range(NUM_TILES):
        token_ids = tile * BLOCK + tile_ids
        values = ahead
        ahead = load_logits(row_ptr, token_ids + BLOCK, vocab_size)
        keys = ordered_key(values, SHIFT)
        is_in = (keys > floor_key) | ((keys == floor_key) & (token_ids <= last_id))
        is_over_1 = is_in & (keys > key_1)
        is_over_2 = is_in & (keys > key_2)
        is_over_3 = is_in & (keys > key_3)
        counts_1 += is_over_1.to(tl.int32)
        counts_2 += is_over_2.to(tl.int32)
        counts_3 += is_over_3.to(tl.int32)
        if HAS_MASS:
            weights = tl.exp2((values - row_max) * scale)
            masses_1 += tl.where(is_over_1, weights, 0.0)
            masses_2 += tl.where(is_over_2, weights, 0.0)
            masses_3 += tl.where(is_over_3, weights, 0.0)
    count_1 = tl.sum(counts_1, axis=0)
    count_2 = tl.sum(counts_2, axis=0)
    count_3 = tl.sum(counts_3, axis=0)
    amount_1 = count_1.to(tl.float64)
    amount_2 = count_2.to(tl.float64)
    amount_3 = count_3.to(tl.float64)
    if HAS_MASS:
        amount_1 = tl.sum(masses_1.to(tl.float64), axis=0)
        amount_2 = tl.sum(masses_2.to(tl.float64), axis=0)
        amount_3 = tl.sum(masses_3.to(tl.float64), axis=0)
    return count_1, count_2, count_3, amount_1, amount_2, amount_3


@triton.jit
def list_tokens(
    row_ptr,
    ids_ptr,
    vocab_size,
    low,
    high,
    floor_key,
    last_id,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Lists the ids of tokens over `low` up to `high`; there must be room for them."""
    num_listed = (vocab_size * 0).to(tl.int32)
    for tile in range(NUM_TILES):
        token_ids = tile * BLOCK + tl.arange(0, BLOCK)
        keys = ordered_key(load_logits(row_ptr, token_ids, vocab_size), SHIFT)
        is_in = (keys > floor_key) | ((keys == floor_key) & (token_ids <= last_id))
        is_listed = (is_in & (keys > low) & (keys <= high)).to(tl.int32)
        places = num_listed + tl.cumsum(is_listed, axis=0) - 1
        tl.store(ids_ptr + places, token_ids, mask=is_listed > 0)
        num_listed += tl.sum(is_listed, axis=0)
    tl.debug_barrier()


@triton.jit
def load_listed(row_ptr, ids_ptr, places, num_listed):
    """Returns ids and logits of listed tokens; minus infinity behind the last."""
    is_listed = places < num_listed
    token_ids = tl.load(ids_ptr + places, mask=is_listed, other=NO_ID)
    values = clean(tl.load(row_ptr + token_ids, mask=is_listed, other=0))
    return token_ids, tl.where(is_listed, values, float("-inf"))


@triton.jit
def rank_listed(
    row_ptr,
    ids_ptr,
    num_listed,
    amount_above,
    target,
    row_max,
    scale,
    HAS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Returns key and id of the last listed token before which the target is not reached."""
    token_ids, values = load_listed(row_ptr, ids_ptr, tl.arange(0, MAX_RANKED), num_listed)
    ranks = tl.zeros([MAX_RANKED], dtype=tl.int32)
    amounts = tl.zeros([MAX_RANKED], dtype=tl.float64) + amount_above
    start = 0
    while start < num_listed:
        other_ids, other_values = load_listed(row_ptr, ids_ptr, start + tl.arange(0, 8), num_listed)
        is_before = come_before(other_values, other_ids, values, token_ids)
        num_before = tl.sum(is_before.to(tl.int32), axis=1)
        ranks += num_before
        if HAS_MASS:
            weights = tl.exp2((other_values - row_max) * scale)[None, :]
            amounts += tl.sum(tl.where(is_before, weights, 0.0).to(tl.float64), axis=1)
        else:
            amounts += num_before.to(tl.float64)
        start += 8
    is_kept = (values > float("-inf")) & (amounts < target)
    last_rank = tl.max(tl.where(is_kept, ranks, -1), axis=0)
    is_last = is_kept & (ranks == last_rank)
    keys = tl.where(is_last, ordered_key(values, SHIFT), -0x7FFFFFFF)
    last_key = tl.max(keys, axis=0).to(tl.int64)
    return last_key, tl.min(tl.where(is_last, token_ids, NO_ID), axis=0).to(tl.int64)


@triton.jit
def find_last_id(
    row_ptr,
    vocab_size,
    key,
    num_kept,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Returns the id up to which exactly `num_kept` tokens have this very key."""
    low = num_kept * 0 - 1
    high = low + vocab_size
    while high - low > 1:
        middle = (low + high) >> 1
        counts = tl.zeros([BLOCK], dtype=tl.int32)
        for tile in range(NUM_TILES):
            token_ids = tile * BLOCK + tl.arange(0, BLOCK)
            values = load_logits(row_ptr, token_ids, vocab_size)
            is_equal = (token_ids <= middle) & (ordered_key(values, SHIFT) == key)
            counts += (is_equal & (token_ids < vocab_size)).to(tl.int32)
        has_enough = tl.sum(counts, axis=0) >= num_kept
        high = tl.where(has_enough, middle, high)
        low = tl.where(has_enough, low, middle)
    return high
