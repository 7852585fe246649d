"""Chooses tokens on the device: the same tokens as `pdserve.sampler` for the same logits.

One launch serves greedy rows and rows without filters: programs reduce chunks of the vocabulary,
and the one that arrives last at a row joins its chunks, in their order. Rows with top-k, top-p or
min-p go on to `filters` (a ranking of the most likely tokens), and those with flat distributions
to `vocabulary_search`.

Where the choice can differ from the CPU's: among equal logits at the edge of a top-k or top-p set
the lowest ids are kept here, where `topk` on the CPU keeps whichever it finds; and a cumulative
probability that equals top-p to the last bits may fall on the other side.

Letters: R rows, V vocabulary.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.filters import filter_kernel
from pdserve.kernels.launch import launch_options
from pdserve.kernels.logits import clean, load_logits
from pdserve.kernels.noise import LOG2_E, NO_ID, exact_score, noise_bits, noise_key, race
from pdserve.kernels.sampling_state import (
    CHUNK,
    MAX_CANDIDATES,
    MAX_CHUNKS,
    SUB_CHUNK,
    DeviceSampling,
    RowKind,
    check_device,
)
from pdserve.kernels.vocabulary_search import search_kernel


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
    token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(row_ptr, token_ids, vocab_size)
    chunk_max = tl.max(values, axis=0)
    choice = tl.min(tl.where(values == chunk_max, token_ids, NO_ID), axis=0)
    field_ptr = fields_ptr + row * 8
    place = row * num_chunks + chunk
    if HAS_LOGPROBS:
        chunk_sum = tl.sum(tl.exp2((values - chunk_max) * LOG2_E), axis=0)
        tl.store(chunk_sum_ptr + place, chunk_sum)
    is_filtered = False
    if HAS_RANDOM:
        temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
        key = noise_key(tl.load(field_ptr + 3), tl.load(field_ptr + 5), tl.load(field_ptr + 6))
        if HAS_FILTERS:
            top_p = tl.load(field_ptr + 1).to(tl.float64, bitcast=True)
            log_min_p = tl.load(field_ptr + 2).to(tl.float64, bitcast=True)
            top_k = tl.load(field_ptr + 4)
            is_filtered = (temperature > 0) & (
                ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (log_min_p > float("-inf"))
            )
            if is_filtered:
                subs = chunk * (BLOCK // SUB_CHUNK) + tl.arange(0, BLOCK // SUB_CHUNK)
                sub_max = tl.max(tl.reshape(values, [BLOCK // SUB_CHUNK, SUB_CHUNK]), axis=1)
                sub_at = sub_max_ptr + row * num_sub_chunks + subs
                tl.store(sub_at, sub_max, mask=subs < num_sub_chunks)
                if top_p < 1:
                    scaled = (values.to(tl.float64) - chunk_max.to(tl.float64)) / temperature
                    tl.store(chunk_mass_ptr + place, tl.sum(tl.exp(scaled), axis=0))
        if (temperature > 0) & (not is_filtered):
            choice, _ = race(values, token_ids, chunk_max, temperature, key)
    tl.store(chunk_max_ptr + place, chunk_max)
    tl.store(chunk_choice_ptr + place, choice)
    tl.debug_barrier()
    num_before = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
    if num_before == num_chunks - 1:
        # All chunks of the row are written. They are read past the first-level cache.
        chunks = tl.arange(0, BLOCK_CHUNKS)
        is_chunk = chunks < num_chunks
        places = row * num_chunks + chunks
        maxima = tl.load(
            chunk_max_ptr + places, mask=is_chunk, other=float("-inf"), cache_modifier=".cg"
        )
        choices = tl.load(
            chunk_choice_ptr + places, mask=is_chunk, other=NO_ID, cache_modifier=".cg"
        )
        row_max = tl.max(maxima, axis=0)
        token = tl.min(tl.where(maxima == row_max, choices, NO_ID), axis=0)
        log_sum = 0.0
        if HAS_LOGPROBS:
            sums = tl.load(chunk_sum_ptr + places, mask=is_chunk, other=0, cache_modifier=".cg")
            log_sum = tl.log(tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E), axis=0))
        if HAS_RANDOM:
            if (temperature > 0) & (not is_filtered):
                chosen = clean(tl.load(row_ptr + choices, mask=is_chunk, other=0))
                scores = exact_score(chosen, row_max, temperature, noise_bits(key, choices))
                scores = tl.where(is_chunk, scores, float("-inf"))
                best = tl.max(scores, axis=0)
                token = tl.min(tl.where(scores == best, choices, NO_ID), axis=0)
        if HAS_FILTERS:
            if is_filtered:
                mass = temperature * 0
                if top_p < 1:
                    masses = tl.load(
                        chunk_mass_ptr + places, mask=is_chunk, other=0, cache_modifier=".cg"
                    )
                    scaled = (maxima.to(tl.float64) - row_max.to(tl.float64)) / temperature
                    mass = tl.sum(masses * tl.exp(scaled), axis=0)
                tl.store(stats_ptr + row * 3, row_max.to(tl.float64))
                tl.store(stats_ptr + row * 3 + 1, log_sum.to(tl.float64))
                tl.store(stats_ptr + row * 3 + 2, mass)
        if not is_filtered:
            tl.store(out_ids_ptr + row, token.to(out_ids_ptr.dtype.element_ty))
            if HAS_LOGPROBS:
                value = clean(tl.load(row_ptr + token))
                tl.store(out_logprobs_ptr + row, value - row_max - log_sum)
            tl.store(field_ptr + 6, tl.load(field_ptr + 6) + 1)
        tl.store(arrived_ptr + row, 0)


def sample_rows(
    logits_RV: Tensor,
    rows: DeviceSampling,
    out_ids_R: Tensor,
    out_logprobs_R: Tensor | None,
    *,
    kind: RowKind | None = None,
    use_pdl: bool = False,
) -> None:
    """Chooses a token for each row of logits and counts up the rows' output indices.

    Args:
        logits_RV: float32, bfloat16 or float16; contiguous within a row. Not changed.
        rows: parameters of the first R rows.
        out_ids_R: int32 or int64, overwritten.
        out_logprobs_R: float32, overwritten with the log-probability of each choice under the raw
            logits; None spares the work.
        kind: the greatest kind of row to serve; None asks `rows`. A graph is captured for one.
        use_pdl: launch while the kernel before still runs.
    """
    check_device(logits_RV, rows)
    num_rows = logits_RV.shape[0]
    if num_rows == 0:
        return
    kind = rows.kind_of(num_rows) if kind is None else kind
    has_filters = kind == RowKind.FILTERED
    choose_kernel[(rows.num_chunks, num_rows)](
        logits_RV,
        rows.fields,
        rows.chunk_max,
        rows.chunk_sum,
        rows.chunk_mass,
        rows.chunk_choice,
        rows.sub_max,
        rows.arrived,
        rows.stats,
        out_ids_R,
        rows.stats if out_logprobs_R is None else out_logprobs_R,
        logits_RV.stride(0),
        rows.vocab_size,
        rows.num_chunks,
        rows.num_sub_chunks,
        HAS_RANDOM=kind != RowKind.GREEDY,
        HAS_FILTERS=has_filters,
        HAS_LOGPROBS=out_logprobs_R is not None,
        BLOCK=CHUNK,
        SUB_CHUNK=SUB_CHUNK,
        BLOCK_CHUNKS=triton.next_power_of_2(rows.num_chunks),
        USE_PDL=use_pdl,
        **launch_options(4, use_pdl=use_pdl),
    )
    if has_filters:
        _launch_filters(logits_RV, rows, out_ids_R, out_logprobs_R, use_pdl)


def _launch_filters(
    logits_RV: Tensor,
    rows: DeviceSampling,
    out_ids_R: Tensor,
    out_logprobs_R: Tensor | None,
    use_pdl: bool,
) -> None:
    num_rows = logits_RV.shape[0]
    shift = key_shift(logits_RV)
    logprobs = rows.stats if out_logprobs_R is None else out_logprobs_R
    filter_kernel[(num_rows,)](
        logits_RV,
        rows.fields,
        rows.sub_max,
        rows.stats,
        rows.candidates,
        rows.weights,
        rows.is_wide,
        out_ids_R,
        logprobs,
        logits_RV.stride(0),
        rows.vocab_size,
        rows.num_sub_chunks,
        HAS_LOGPROBS=out_logprobs_R is not None,
        SHIFT=shift,
        SUB_CHUNK=SUB_CHUNK,
        MAX_CHUNKS=MAX_CHUNKS,
        MAX_CANDIDATES=MAX_CANDIDATES,
        BLOCK_SUBS=triton.next_power_of_2(rows.num_sub_chunks),
        USE_PDL=use_pdl,
        **launch_options(8, use_pdl=use_pdl),
    )
    search_kernel[(num_rows,)](
        logits_RV,
        rows.fields,
        rows.stats,
        rows.is_wide,
        out_ids_R,
        logprobs,
        logits_RV.stride(0),
        rows.vocab_size,
        HAS_LOGPROBS=out_logprobs_R is not None,
        SHIFT=shift,
        BLOCK=4096,
        NUM_TILES=triton.cdiv(rows.vocab_size, 4096),
        USE_PDL=use_pdl,
        **launch_options(16, use_pdl=use_pdl),
    )


def key_shift(logits: Tensor) -> int:
    """Returns how many bits of a float32 the logits' dtype leaves zero."""
    return {"torch.bfloat16": 16, "torch.float16": 13}.get(str(logits.dtype), 0)
