"""Greedy choice and the unfiltered draw, in one launch over chunks of the vocabulary.

Each program reduces one chunk of one row. The program that arrives last at a row joins its chunks,
in their order, so the outcome does not depend on which one that is.
"""

import triton
import triton.language as tl

from pdserve.kernels.logits import clean, load_logits
from pdserve.kernels.noise import LOG2_E, NO_ID, draw_exactly, noise_key, race

IS_LATE = tl.constexpr(".cg")
"""What other programs wrote is read past the first-level cache."""


@triton.jit
def load_key(field_ptr):
    """Returns what the noise of a row's tokens has in common."""
    return noise_key(tl.load(field_ptr + 3), tl.load(field_ptr + 5), tl.load(field_ptr + 6))


@triton.jit
def load_filters(field_ptr, vocab_size):
    """Returns temperature, top-p and log(min-p) of a row, float64, and its top-k.

    Top-k is the vocabulary's size where nothing is cut.
    """
    temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
    top_p = tl.load(field_ptr + 1).to(tl.float64, bitcast=True)
    log_min_p = tl.load(field_ptr + 2).to(tl.float64, bitcast=True)
    top_k = tl.load(field_ptr + 4)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    return temperature, top_p, log_min_p, top_k


@triton.jit
def needs_filters(field_ptr, vocab_size):
    """Says whether a row draws from less than the whole vocabulary."""
    temperature, top_p, log_min_p, top_k = load_filters(field_ptr, vocab_size)
    has_any = (top_k < vocab_size) | (top_p < 1) | (log_min_p > float("-inf"))
    return (temperature > 0) & has_any


@triton.jit
def finish_row(
    row,
    row_ptr,
    token,
    row_max,
    log_sum,
    field_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    HAS_LOGPROBS: tl.constexpr,
):
    """Writes what was chosen and counts up the output index."""
    tl.store(out_ids_ptr + row, token.to(out_ids_ptr.dtype.element_ty))
    if HAS_LOGPROBS:
        value = clean(tl.load(row_ptr + token))
        tl.store(out_logprobs_ptr + row, (value - row_max - log_sum).to(tl.float32))
    tl.store(field_ptr + 6, tl.load(field_ptr + 6) + 1)


@triton.jit
def store_for_filters(
    values,
    chunk,
    chunk_max,
    row,
    place,
    field_ptr,
    sub_max_ptr,
    chunk_mass_ptr,
    num_sub_chunks,
    BLOCK: tl.constexpr,
    SUB_CHUNK: tl.constexpr,
):
    """Keeps the greatest logit of each short run, and the chunk's mass if top-p will ask."""
    subs = chunk * (BLOCK // SUB_CHUNK) + tl.arange(0, BLOCK // SUB_CHUNK)
    sub_max = tl.max(tl.reshape(values, [BLOCK // SUB_CHUNK, SUB_CHUNK]), axis=1)
    tl.store(sub_max_ptr + row * num_sub_chunks + subs, sub_max, mask=subs < num_sub_chunks)
    if tl.load(field_ptr + 1).to(tl.float64, bitcast=True) < 1:
        temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
        scaled = (values.to(tl.float64) - chunk_max.to(tl.float64)) / temperature
        tl.store(chunk_mass_ptr + place, tl.sum(tl.exp(scaled), axis=0))


@triton.jit
def join_masses(maxima, row_max, places, is_chunk, field_ptr, chunk_mass_ptr):
    """Returns the sum over the row of exponentials at its temperature; 0 if nothing will ask."""
    temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
    mass = temperature * 0
    if tl.load(field_ptr + 1).to(tl.float64, bitcast=True) < 1:
        masses = tl.load(chunk_mass_ptr + places, mask=is_chunk, other=0, cache_modifier=IS_LATE)
        scaled = (maxima.to(tl.float64) - row_max.to(tl.float64)) / temperature
        mass = tl.sum(masses * tl.exp(scaled), axis=0)
    return mass


@triton.jit
def join_draws(row_ptr, choices, row_max, is_chunk, field_ptr):
    """Returns the winner among the winners of chunks."""
    temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
    values = clean(tl.load(row_ptr + choices, mask=is_chunk, other=0))
    return draw_exactly(values, choices, is_chunk, row_max, temperature, load_key(field_ptr))


@triton.jit
def join_chunks(
    row,
    row_ptr,
    field_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_mass_ptr,
    chunk_choice_ptr,
    stats_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    vocab_size,
    num_chunks,
    HAS_RANDOM: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Finishes a row, or leaves its statistics to the filters."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = chunks < num_chunks
    places = row * num_chunks + chunks
    maxima = tl.load(
        chunk_max_ptr + places, mask=is_chunk, other=float("-inf"), cache_modifier=IS_LATE
    )
    choices = tl.load(chunk_choice_ptr + places, mask=is_chunk, other=NO_ID, cache_modifier=IS_LATE)
    row_max = tl.max(maxima, axis=0)
    log_sum = row_max * 0
    if HAS_LOGPROBS:
        sums = tl.load(chunk_sum_ptr + places, mask=is_chunk, other=0, cache_modifier=IS_LATE)
        log_sum = tl.log(tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E), axis=0))
    is_filtered = row < 0
    if HAS_FILTERS:
        is_filtered = needs_filters(field_ptr, vocab_size)
    if is_filtered:
        if HAS_FILTERS:
            mass = join_masses(maxima, row_max, places, is_chunk, field_ptr, chunk_mass_ptr)
            tl.store(stats_ptr + row * 3, row_max.to(tl.float64))
            tl.store(stats_ptr + row * 3 + 1, log_sum.to(tl.float64))
            tl.store(stats_ptr + row * 3 + 2, mass)
    else:
        token = tl.min(tl.where(maxima == row_max, choices, NO_ID), axis=0)
        if HAS_RANDOM:  # noqa: SIM102 - decided when the kernel is compiled
            if tl.load(field_ptr).to(tl.float64, bitcast=True) > 0:
                token = join_draws(row_ptr, choices, row_max, is_chunk, field_ptr)
        finish_row(
            row,
            row_ptr,
            token,
            row_max,
            log_sum,
            field_ptr,
            out_ids_ptr,
            out_logprobs_ptr,
            HAS_LOGPROBS,
        )


@triton.jit
def choose_kernel(
    logits_ptr,
    fields_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_mass_ptr,
    chunk_choice_ptr,
    sub_max_ptr,
    arrived_ptr,
    stats_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    num_sub_chunks,
    HAS_RANDOM: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB_CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk and row."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    field_ptr = fields_ptr + row * 8
    place = row * num_chunks + chunk
    token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(row_ptr, token_ids, vocab_size)
    chunk_max = tl.max(values, axis=0)
    choice = tl.min(tl.where(values == chunk_max, token_ids, NO_ID), axis=0)
    if HAS_LOGPROBS:
        chunk_sum = tl.sum(tl.exp2((values - chunk_max) * LOG2_E), axis=0)
        tl.store(chunk_sum_ptr + place, chunk_sum)
    if HAS_RANDOM:
        temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
        is_drawn = temperature > 0
        if HAS_FILTERS:  # noqa: SIM102 - decided when the kernel is compiled
            if needs_filters(field_ptr, vocab_size):
                is_drawn = temperature < 0
                store_for_filters(
                    values,
                    chunk,
                    chunk_max,
                    row,
                    place,
                    field_ptr,
                    sub_max_ptr,
                    chunk_mass_ptr,
                    num_sub_chunks,
                    BLOCK,
                    SUB_CHUNK,
                )
        if is_drawn:
            choice, _ = race(values, token_ids, chunk_max, temperature, load_key(field_ptr))
    tl.store(chunk_max_ptr + place, chunk_max)
    tl.store(chunk_choice_ptr + place, choice)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") == num_chunks - 1:
        join_chunks(
            row,
            row_ptr,
            field_ptr,
            chunk_max_ptr,
            chunk_sum_ptr,
            chunk_mass_ptr,
            chunk_choice_ptr,
            stats_ptr,
            out_ids_ptr,
            out_logprobs_ptr,
            vocab_size,
            num_chunks,
            HAS_RANDOM,
            HAS_FILTERS,
            HAS_LOGPROBS,
            BLOCK_CHUNKS,
        )
        tl.store(arrived_ptr + row, 0)
