"""Top-k, top-p and min-p by a search of the whole vocabulary, for rows that need it.

One program per row reads the logits, which stay in the second-level cache, and narrows the interval
that the threshold lies in by three keys at a time. Once it holds few tokens they are ranked.
Probabilities are float32 exponentials: a set may differ from the CPU's by a token whose cumulative
probability is within about 1e-7 of top-p.

What filters keep is told by a key and an id: tokens over the key, and those at it up to the id.
"""

import triton
import triton.language as tl

from pdserve.kernels.choice import finish_row, load_filters, load_key
from pdserve.kernels.logits import key_value, load_logits, ordered_key
from pdserve.kernels.noise import MAX_SCALE, NO_ID, race
from pdserve.kernels.vocabulary_scan import (
    MAX_RANKED,
    find_last_id,
    list_tokens,
    measure_tokens,
    rank_listed,
)

NUM_VALUE_PASSES = tl.constexpr(8)
"""Passes that split the interval by values, where logits lie evenly; later ones split by keys."""


@triton.jit
def split_interval(low, high, num_passes, unit, SHIFT: tl.constexpr):
    """Returns three keys strictly between two others that are more than one apart."""
    key_1 = low + (high - low) // 4
    key_2 = low + (high - low) // 2
    key_3 = low + (high - low) // 4 * 3
    if num_passes < NUM_VALUE_PASSES:
        top = key_value(high, SHIFT).to(tl.float64)
        span = top - key_value(low, SHIFT).to(tl.float64)
        # A wide interval is cut near its upper end, each time more coarsely.
        is_wide = span > 64 * unit
        step_1 = tl.where(is_wide, 64 * unit, span * 0.75)
        step_2 = tl.where(is_wide, 16 * unit, span * 0.5)
        step_3 = tl.where(is_wide, 4 * unit, span * 0.25)
        key_1 = ordered_key((top - step_1).to(tl.float32), SHIFT).to(tl.int64)
        key_2 = ordered_key((top - step_2).to(tl.float32), SHIFT).to(tl.int64)
        key_3 = ordered_key((top - step_3).to(tl.float32), SHIFT).to(tl.int64)
    key_1 = tl.minimum(tl.maximum(key_1, low + 1), high - 1)
    key_2 = tl.minimum(tl.maximum(key_2, low + 1), high - 1)
    key_3 = tl.minimum(tl.maximum(key_3, low + 1), high - 1)
    return key_1, key_2, key_3


@triton.jit
def narrow(low, count_low, high, count_high, amount_high, key, count, amount, target):
    """Moves the end of the interval that a key belongs to, if it lies inside."""
    is_short = amount < target
    is_low = (key > low) & (amount >= target)
    is_high = (key < high) & is_short
    low = tl.where(is_low, key, low)
    count_low = tl.where(is_low, count, count_low)
    high = tl.where(is_high, key, high)
    count_high = tl.where(is_high, count, count_high)
    amount_high = tl.where(is_high, amount, amount_high)
    return low, count_low, high, count_high, amount_high


@triton.jit
def limit_to_min_p(row_max, temperature, log_min_p, least_key, greatest_key, SHIFT: tl.constexpr):
    """Returns the least key that is likely enough; reads no logits."""
    low = least_key - 1
    high = greatest_key
    while high - low > 1:
        middle = (low + high) >> 1
        value = key_value(middle, SHIFT).to(tl.float64)
        is_likely = (value - row_max.to(tl.float64)) / temperature >= log_min_p
        high = tl.where(is_likely, middle, high)
        low = tl.where(is_likely, low, middle)
    return high


@triton.jit
def limit_tokens(
    row_ptr,
    ids_ptr,
    vocab_size,
    target,
    known_amount,
    floor_key,
    last_id,
    greatest_key,
    row_max,
    scale,
    HAS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Keeps the most likely tokens before which a count, or a share of the mass, is not reached.

    Args:
        row_ptr: logits.
        ids_ptr: room for `MAX_RANKED` ids.
        vocab_size: tokens.
        target: float64; a count, or with `HAS_MASS` a share below 1.
        known_amount: float64; count or mass of the whole vocabulary, if all of it is kept so far.
            Negative if less is kept: then it is measured.
        floor_key: what is kept so far.
        last_id: likewise.
        greatest_key: of the row.
        row_max: the greatest logit.
        scale: from logits to log2 of unnormed probabilities.
        HAS_MASS: the target is a share of the mass.
        SHIFT: of keys.
        BLOCK: tokens of a tile.
        NUM_TILES: of the vocabulary.

    Returns:
        Floor key and last id of what is kept.
    """
    low = floor_key - 1
    high = greatest_key
    # Nothing lies over the greatest key.
    count_high = (vocab_size * 0).to(tl.int32)
    amount_high = target * 0
    count_low = count_high + vocab_size
    amount = known_amount
    if known_amount < 0:
        count_low, _, _, amount, _, _ = measure_tokens(
            row_ptr,
            vocab_size,
            low,
            high,
            high,
            floor_key,
            last_id,
            row_max,
            scale,
            HAS_MASS,
            SHIFT,
            BLOCK,
            NUM_TILES,
        )
    unit = target * 0 + 0.25
    if HAS_MASS:
        target = target * amount
        unit = 0.36 / scale.to(tl.float64)
    num_passes = 0
    # Over `low` the target is reached, over `high` it is not.
    while (high - low > 1) & (count_low - count_high > MAX_RANKED):
        key_1, key_2, key_3 = split_interval(low, high, num_passes, unit, SHIFT)
        count_1, count_2, count_3, amount_1, amount_2, amount_3 = measure_tokens(
            row_ptr,
            vocab_size,
            key_1,
            key_2,
            key_3,
            floor_key,
            last_id,
            row_max,
            scale,
            HAS_MASS,
            SHIFT,
            BLOCK,
            NUM_TILES,
        )
        low, count_low, high, count_high, amount_high = narrow(
            low, count_low, high, count_high, amount_high, key_1, count_1, amount_1, target
        )
        low, count_low, high, count_high, amount_high = narrow(
            low, count_low, high, count_high, amount_high, key_2, count_2, amount_2, target
        )
        low, count_low, high, count_high, amount_high = narrow(
            low, count_low, high, count_high, amount_high, key_3, count_3, amount_3, target
        )
        num_passes += 1
        unit *= 16
    num_inside = count_low - count_high
    if num_inside <= MAX_RANKED:
        list_tokens(
            row_ptr,
            ids_ptr,
            vocab_size,
            low,
            high,
            floor_key,
            last_id,
            SHIFT,
            2 * BLOCK,
            (NUM_TILES + 1) // 2,
        )
        floor_key, last_id = rank_listed(
            row_ptr, ids_ptr, num_inside, amount_high, target, row_max, scale, HAS_MASS, SHIFT
        )
    else:
        # More equal logits than can be ranked; the lowest ids are kept.
        weight = target * 0 + 1
        if HAS_MASS:
            weight = tl.exp2((key_value(high, SHIFT) - row_max) * scale).to(tl.float64)
        num_kept = tl.maximum(tl.ceil((target - amount_high) / weight), 1.0).to(tl.int32)
        num_kept = tl.minimum(num_kept, num_inside)
        last_id = find_last_id(row_ptr, vocab_size, high, num_kept, SHIFT, BLOCK, NUM_TILES)
        last_id = last_id.to(tl.int64)
        floor_key = high
    return floor_key, last_id


@triton.jit
def search_kernel(
    logits_ptr,
    fields_ptr,
    stats_ptr,
    candidates_ptr,
    is_wide_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    logits_stride,
    vocab_size,
    candidates_stride,
    HAS_LOGPROBS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per row; does nothing but for marked rows."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_wide_ptr + row) != 0:
        row_ptr = logits_ptr + row * logits_stride
        field_ptr = fields_ptr + row * 8
        ids_ptr = candidates_ptr + row * candidates_stride
        temperature, top_p, log_min_p, top_k = load_filters(field_ptr, vocab_size)
        key = load_key(field_ptr)
        row_max = tl.load(stats_ptr + row * 3).to(tl.float32)
        scale = tl.minimum(1.4426950408889634 / temperature, MAX_SCALE).to(tl.float32)
        greatest_key = ordered_key(row_max, SHIFT).to(tl.int64)
        least_key = greatest_key * 0 - (0x7F800000 >> SHIFT)
        floor_key = least_key
        last_id = top_k * 0 + vocab_size
        known_mass = tl.load(stats_ptr + row * 3 + 2)
        if top_k < vocab_size:
            floor_key, last_id = limit_tokens(
                row_ptr,
                ids_ptr,
                vocab_size,
                top_k.to(tl.float64),
                top_k.to(tl.float64) * 0 + vocab_size,
                floor_key,
                last_id,
                greatest_key,
                row_max,
                scale,
                False,
                SHIFT,
                BLOCK,
                NUM_TILES,
            )
            known_mass = top_p * 0 - 1
        if log_min_p > float("-inf"):
            known_mass = top_p * 0 - 1
            likely_key = limit_to_min_p(
                row_max, temperature, log_min_p, least_key, greatest_key, SHIFT
            )
            last_id = tl.where(likely_key > floor_key, vocab_size, last_id)
            floor_key = tl.maximum(floor_key, likely_key)
        if top_p < 1:
            floor_key, last_id = limit_tokens(
                row_ptr,
                ids_ptr,
                vocab_size,
                top_p,
                known_mass,
                floor_key,
                last_id,
                greatest_key,
                row_max,
                scale,
                True,
                SHIFT,
                BLOCK,
                NUM_TILES,
            )
        token = tl.zeros([], dtype=tl.int32) + NO_ID
        best = temperature * 0 + float("-inf")
        for tile in range((NUM_TILES + 1) // 2):
            token_ids = tile * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
            values = load_logits(row_ptr, token_ids, vocab_size)
            keys = ordered_key(values, SHIFT)
            is_kept = (keys > floor_key) | ((keys == floor_key) & (token_ids <= last_id))
            values = tl.where(is_kept & (token_ids < vocab_size), values, float("-inf"))
            winner, score = race(values, token_ids, row_max, temperature, key)
            token = tl.where(score > best, winner, token)
            best = tl.maximum(score, best)
        finish_row(
            row,
            row_ptr,
            token,
            row_max.to(tl.float64),
            tl.load(stats_ptr + row * 3 + 1),
            field_ptr,
            out_ids_ptr,
            out_logprobs_ptr,
            HAS_LOGPROBS,
        )
        # Not before: each warp reads the mark by itself, and one that came late would find it gone
        # and leave the others alone at their barriers (an illegal access, seen with 32 warps).
        tl.store(is_wide_ptr + row, 0)
