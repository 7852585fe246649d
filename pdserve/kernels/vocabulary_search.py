"""Top-k, top-p and min-p by bisection over the whole vocabulary, for rows that need it.

One program per row reads the logits, which stay in the second-level cache, once per halving of the
interval that the threshold is in. Probabilities are float32 exponentials added up in float64: a set
may differ from the CPU's by a token whose cumulative probability is within about 1e-7 of top-p.
"""

import triton
import triton.language as tl

from pdserve.kernels.choice import finish_row, load_key
from pdserve.kernels.logits import key_value, load_logits, ordered_key
from pdserve.kernels.noise import MAX_SCALE, NO_ID, race


@triton.jit
def count_reaching(
    row_ptr, vocab_size, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr, NUM_TILES: tl.constexpr
):
    """Counts tokens whose key is at least `key`."""
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for tile in range(NUM_TILES):
        token_ids = tile * BLOCK + tl.arange(0, BLOCK)
        values = load_logits(row_ptr, token_ids, vocab_size)
        is_reaching = (token_ids < vocab_size) & (ordered_key(values, SHIFT) >= key)
        counts += is_reaching.to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def mass_above(
    row_ptr,
    vocab_size,
    key,
    floor_key,
    last_id,
    row_max,
    scale,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Adds up unnormed probabilities of tokens over `key`, at the floor only up to `last_id`."""
    masses = tl.zeros([BLOCK], dtype=tl.float64)
    for tile in range(NUM_TILES):
        token_ids = tile * BLOCK + tl.arange(0, BLOCK)
        values = load_logits(row_ptr, token_ids, vocab_size)
        keys = ordered_key(values, SHIFT)
        is_above = (keys > key) & ((keys > floor_key) | (token_ids <= last_id))
        weights = tl.exp2((values - row_max) * scale)
        masses += tl.where((token_ids < vocab_size) & is_above, weights, 0.0).to(tl.float64)
    return tl.sum(masses, axis=0)


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


@triton.jit
def limit_to_top_k(
    row_ptr,
    vocab_size,
    top_k,
    least_key,
    greatest_key,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Returns the least key of the `top_k` most likely tokens and the last id that may have it."""
    low = least_key
    high = greatest_key + 1
    # At least k tokens reach `low`, fewer reach `high`.
    while high - low > 1:
        middle = (low + high) >> 1
        num_reaching = count_reaching(row_ptr, vocab_size, middle, SHIFT, BLOCK, NUM_TILES)
        low = tl.where(num_reaching >= top_k, middle, low)
        high = tl.where(
            num_reaching < top_k, middle, tl.where(num_reaching == top_k, low + 1, high)
        )
    last_id = top_k * 0 + vocab_size
    if count_reaching(row_ptr, vocab_size, low, SHIFT, BLOCK, NUM_TILES) > top_k:
        num_over = count_reaching(row_ptr, vocab_size, low + 1, SHIFT, BLOCK, NUM_TILES)
        last_id = find_last_id(row_ptr, vocab_size, low, top_k - num_over, SHIFT, BLOCK, NUM_TILES)
    return low, last_id


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
def limit_to_top_p(
    row_ptr,
    vocab_size,
    top_p,
    floor_key,
    last_id,
    greatest_key,
    row_max,
    scale,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Returns the least key of the tokens before which `top_p` is not reached, and a last id."""
    low = floor_key - 1
    high = greatest_key
    total = mass_above(
        row_ptr, vocab_size, low, floor_key, last_id, row_max, scale, SHIFT, BLOCK, NUM_TILES
    )
    while high - low > 1:
        middle = (low + high) >> 1
        mass = mass_above(
            row_ptr, vocab_size, middle, floor_key, last_id, row_max, scale, SHIFT, BLOCK, NUM_TILES
        )
        is_short = mass / total < top_p
        high = tl.where(is_short, middle, high)
        low = tl.where(is_short, low, middle)
    mass = mass_above(
        row_ptr, vocab_size, high, floor_key, last_id, row_max, scale, SHIFT, BLOCK, NUM_TILES
    )
    with_ties = mass_above(
        row_ptr, vocab_size, high - 1, floor_key, last_id, row_max, scale, SHIFT, BLOCK, NUM_TILES
    )
    weight = tl.exp2((key_value(high, SHIFT) - row_max) * scale).to(tl.float64)
    num_ties = ((with_ties - mass) / weight + 0.5).to(tl.int64)
    num_kept = tl.maximum(tl.ceil((top_p * total - mass) / weight), 1.0).to(tl.int64)
    last_id = tl.where(high > floor_key, vocab_size, last_id)
    if num_kept < num_ties:
        last_id = find_last_id(row_ptr, vocab_size, high, num_kept, SHIFT, BLOCK, NUM_TILES)
    return high, last_id


@triton.jit
def search_kernel(
    logits_ptr,
    fields_ptr,
    stats_ptr,
    is_wide_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    logits_stride,
    vocab_size,
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
        tl.store(is_wide_ptr + row, 0)
        row_ptr = logits_ptr + row * logits_stride
        field_ptr = fields_ptr + row * 8
        temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
        top_p = tl.load(field_ptr + 1).to(tl.float64, bitcast=True)
        log_min_p = tl.load(field_ptr + 2).to(tl.float64, bitcast=True)
        key = load_key(field_ptr)
        top_k = tl.load(field_ptr + 4)
        row_max = tl.load(stats_ptr + row * 3).to(tl.float32)
        scale = tl.minimum(1.4426950408889634 / temperature, MAX_SCALE).to(tl.float32)
        greatest_key = ordered_key(row_max, SHIFT).to(tl.int64)
        least_key = greatest_key * 0 - (0x7F800000 >> SHIFT)
        floor_key = least_key
        last_id = top_k * 0 + vocab_size
        if (top_k > 0) & (top_k < vocab_size):
            floor_key, last_id = limit_to_top_k(
                row_ptr, vocab_size, top_k, least_key, greatest_key, SHIFT, BLOCK, NUM_TILES
            )
        if log_min_p > float("-inf"):
            likely_key = limit_to_min_p(
                row_max, temperature, log_min_p, least_key, greatest_key, SHIFT
            )
            last_id = tl.where(likely_key > floor_key, vocab_size, last_id)
            floor_key = tl.maximum(floor_key, likely_key)
        if top_p < 1:
            floor_key, last_id = limit_to_top_p(
                row_ptr,
                vocab_size,
                top_p,
                floor_key,
                last_id,
                greatest_key,
                row_max,
                scale,
                SHIFT,
                BLOCK,
                NUM_TILES,
            )
        token = tl.zeros([], dtype=tl.int32) + NO_ID
        best = temperature * 0 + float("-inf")
        for tile in range(NUM_TILES):
            token_ids = tile * BLOCK + tl.arange(0, BLOCK)
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
