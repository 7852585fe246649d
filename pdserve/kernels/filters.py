"""Top-k, top-p and min-p by ranking the most likely tokens; exact, or left to another kernel.

The greatest logits of short runs of the vocabulary are known. A bound is found that at most
`MAX_CHUNKS` of them reach; all tokens that reach it are in those runs. There are a few hundred of
these candidates: each counts the candidates before it and adds up their probabilities, which gives
its rank and its cumulative probability. If the filters keep a token below the bound, or there are
too many candidates, the row is marked for `vocabulary_search`.
"""

import triton
import triton.language as tl

from pdserve.kernels.choice import finish_row, load_filters, load_key, needs_filters
from pdserve.kernels.logits import clean, come_before, key_value, ordered_key
from pdserve.kernels.noise import NO_ID, draw_exactly


@triton.jit
def find_bound(keys, is_valid, num_keys, MAX_KEPT: tl.constexpr):
    """Returns the least key, int64, that at most `MAX_KEPT` of the keys reach."""
    least = tl.min(tl.where(is_valid, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    # Too many reach `low`, few enough reach `high`.
    low = least
    if num_keys <= MAX_KEPT:
        low = least - 1
        high = least
    while high - low > 1:
        middle = (low + high) >> 1
        num_kept = tl.sum((keys >= middle).to(tl.int32), axis=0)
        high = tl.where(num_kept <= MAX_KEPT, middle, high)
        low = tl.where(num_kept < MAX_KEPT, low, tl.where(num_kept == MAX_KEPT, high - 1, middle))
    return high


@triton.jit
def gather_candidates(
    row_ptr,
    list_ptr,
    keys,
    is_valid,
    bound,
    vocab_size,
    SHIFT: tl.constexpr,
    SUB_CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_SUBS: tl.constexpr,
):
    """Lists the ids of tokens that reach the bound, behind the runs they lie in.

    Returns:
        How many reach it; only the first `MAX_CANDIDATES` are listed.
    """
    is_taken = is_valid & (keys >= bound)
    places = tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + places, tl.arange(0, BLOCK_SUBS), mask=is_taken)
    num_taken = tl.sum(is_taken.to(tl.int32), axis=0)
    tl.debug_barrier()
    runs = tl.arange(0, MAX_CHUNKS)
    subs = tl.load(list_ptr + runs, mask=runs < num_taken, other=0)
    token_ids = subs[:, None] * SUB_CHUNK + tl.arange(0, SUB_CHUNK)[None, :]
    is_listed = (runs < num_taken)[:, None] & (token_ids < vocab_size)
    token_ids = tl.reshape(token_ids, [MAX_CHUNKS * SUB_CHUNK])
    is_listed = tl.reshape(is_listed, [MAX_CHUNKS * SUB_CHUNK])
    values = clean(tl.load(row_ptr + token_ids, mask=is_listed, other=0))
    is_kept = is_listed & (ordered_key(values, SHIFT) >= bound)
    places = tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + MAX_CHUNKS + places, token_ids, mask=is_kept & (places < MAX_CANDIDATES))
    tl.debug_barrier()
    return tl.sum(is_kept.to(tl.int32), axis=0)


@triton.jit
def choose_among(
    row_ptr,
    ids_ptr,
    weights_ptr,
    field_ptr,
    row_max,
    full_mass,
    bound,
    num_candidates,
    vocab_size,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Filters and draws among candidates, in the order of logits and then of ids.

    Returns:
        The token, and whether the candidates decide; else the token means nothing.
    """
    temperature, top_p, log_min_p, top_k = load_filters(field_ptr, vocab_size)

    mine = tl.arange(0, BLOCK)
    is_mine = mine < num_candidates
    token_ids = tl.load(ids_ptr + mine, mask=is_mine, other=NO_ID)
    values = tl.load(row_ptr + token_ids, mask=is_mine, other=0)
    values = tl.where(is_mine, clean(values), float("-inf"))
    scaled = (values.to(tl.float64) - row_max) / temperature
    weights = tl.exp(scaled)
    tl.store(weights_ptr + mine, weights, mask=is_mine)
    tl.debug_barrier()
    ranks = tl.zeros([BLOCK], dtype=tl.int32)
    masses = tl.zeros([BLOCK], dtype=tl.float64)
    start = 0
    while start < num_candidates:
        other = start + tl.arange(0, 8)
        is_other = other < num_candidates
        other_ids = tl.load(ids_ptr + other, mask=is_other, other=NO_ID)
        other_values = tl.load(row_ptr + other_ids, mask=is_other, other=0)
        other_values = tl.where(is_other, clean(other_values), float("-inf"))
        other_weights = tl.load(weights_ptr + other, mask=is_other, other=0)
        is_before = come_before(other_values, other_ids, values, token_ids)
        ranks += tl.sum(is_before.to(tl.int32), axis=1)
        masses += tl.sum(tl.where(is_before, other_weights[None, :], 0.0), axis=1)
        start += 8

    covers_all = num_candidates == vocab_size
    best_left = (key_value(bound - 1, SHIFT).to(tl.float64) - row_max) / temperature
    covers_filters = covers_all | (top_k <= num_candidates) | (best_left < log_min_p)
    is_kept = is_mine & (ranks < top_k) & (scaled >= log_min_p)
    kept_mass = tl.sum(tl.where(is_kept, weights, 0.0), axis=0)
    has_only_top_p = (top_k == vocab_size) & (log_min_p == float("-inf"))
    total = tl.where(covers_filters, kept_mass, full_mass)
    covers = covers_filters | (has_only_top_p & (kept_mass / total >= top_p))
    mass_limit = tl.where(top_p < 1, top_p, float("inf"))
    is_kept = is_kept & (masses / total < mass_limit)
    token = draw_exactly(values, token_ids, is_kept, row_max, temperature, load_key(field_ptr))
    return token, covers


@triton.jit
def filter_kernel(
    logits_ptr,
    fields_ptr,
    sub_max_ptr,
    stats_ptr,
    candidates_ptr,
    weights_ptr,
    is_wide_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    logits_stride,
    vocab_size,
    num_sub_chunks,
    HAS_LOGPROBS: tl.constexpr,
    SHIFT: tl.constexpr,
    SUB_CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_SUBS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per row; rows without filters are done already."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    field_ptr = fields_ptr + row * 8
    if needs_filters(field_ptr, vocab_size):
        row_ptr = logits_ptr + row * logits_stride
        list_ptr = candidates_ptr + row * (MAX_CHUNKS + MAX_CANDIDATES)
        ids_ptr = list_ptr + MAX_CHUNKS
        row_weights_ptr = weights_ptr + row * MAX_CANDIDATES
        row_max = tl.load(stats_ptr + row * 3)
        full_mass = tl.load(stats_ptr + row * 3 + 2)
        subs = tl.arange(0, BLOCK_SUBS)
        is_valid = subs < num_sub_chunks
        maxima = tl.load(
            sub_max_ptr + row * num_sub_chunks + subs, mask=is_valid, other=float("-inf")
        )
        keys = ordered_key(maxima, SHIFT)
        bound = find_bound(keys, is_valid, num_sub_chunks, MAX_CHUNKS)
        # A vocabulary that fits is taken whole.
        if num_sub_chunks <= MAX_CHUNKS:
            bound = bound * 0 - 0x7FFFFFFF
        num_candidates = gather_candidates(
            row_ptr,
            list_ptr,
            keys,
            is_valid,
            bound,
            vocab_size,
            SHIFT,
            SUB_CHUNK,
            MAX_CHUNKS,
            MAX_CANDIDATES,
            BLOCK_SUBS,
        )
        token = num_candidates * 0
        is_decided = num_candidates < 0
        if num_candidates <= 256:
            token, is_decided = choose_among(
                row_ptr,
                ids_ptr,
                row_weights_ptr,
                field_ptr,
                row_max,
                full_mass,
                bound,
                num_candidates,
                vocab_size,
                SHIFT,
                256,
            )
        elif num_candidates <= MAX_CANDIDATES:
            token, is_decided = choose_among(
                row_ptr,
                ids_ptr,
                row_weights_ptr,
                field_ptr,
                row_max,
                full_mass,
                bound,
                num_candidates,
                vocab_size,
                SHIFT,
                MAX_CANDIDATES,
            )
        tl.store(is_wide_ptr + row, tl.where(is_decided, 0, 1))
        if is_decided:
            finish_row(
                row,
                row_ptr,
                token,
                row_max,
                tl.load(stats_ptr + row * 3 + 1),
                field_ptr,
                out_ids_ptr,
                out_logprobs_ptr,
                HAS_LOGPROBS,
            )
