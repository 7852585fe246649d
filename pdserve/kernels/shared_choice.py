"""Greedy choice and the unfiltered draw where each rank has logits of a share of the vocabulary.

    choose_in_share: each chunk of the share gives its best token   (any rank, its own logits)
    the ranks exchange what they found, 16 bytes a chunk
    join_shares: the best of the best, on every rank alike

Noise is a function of seed, indices and token id, so it takes no more than that for the very token
that one rank with all logits would choose. A chunk's finding is four words: its greatest logit, the
token, the token's logit, and the sum of exponentials; floats by their bits.

Letters: R rows, N tokens of a share, C chunks of one.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.choice import load_key
from pdserve.kernels.launch import launch_options
from pdserve.kernels.logits import load_logits
from pdserve.kernels.noise import LOG2_E, NO_ID, exact_score, noise_bits, race
from pdserve.kernels.sampling_state import CHUNK, DeviceSampling, RowKind

FOUND_WORDS = 4


@triton.jit
def choose_in_share_kernel(
    logits_ptr,
    fields_ptr,
    found_ptr,
    logits_stride,
    num_ids,
    first_id,
    HAS_RANDOM: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk and row."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    field_ptr = fields_ptr + row * 8
    places = chunk * BLOCK + tl.arange(0, BLOCK)
    token_ids = first_id + places
    values = load_logits(logits_ptr + row * logits_stride, places, num_ids)
    chunk_max = tl.max(values, axis=0)
    choice = tl.min(tl.where(values == chunk_max, token_ids, NO_ID), axis=0)
    if HAS_RANDOM:
        temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
        if (temperature > 0) & (chunk_max > float("-inf")):
            choice, _ = race(values, token_ids, chunk_max, temperature, load_key(field_ptr))
    value = tl.max(tl.where(token_ids == choice, values, float("-inf")), axis=0)
    is_empty = chunk_max == float("-inf")
    found_ptr += (row * tl.num_programs(0) + chunk) * 4
    tl.store(found_ptr, chunk_max.to(tl.int32, bitcast=True))
    tl.store(found_ptr + 1, tl.where(is_empty, NO_ID, choice))
    tl.store(found_ptr + 2, value.to(tl.int32, bitcast=True))
    if HAS_LOGPROBS:
        total = tl.sum(tl.exp2((values - chunk_max) * LOG2_E), axis=0)
        tl.store(found_ptr + 3, tl.where(is_empty, 0.0, total).to(tl.int32, bitcast=True))


@triton.jit
def load_found(found_ptr, chunks, WORD: tl.constexpr, num_chunks):
    """Loads a word of each chunk's finding, as a float."""
    is_chunk = chunks < num_chunks
    bits = tl.load(found_ptr + chunks * 4 + WORD, mask=is_chunk, other=0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def join_shares_kernel(
    found_ptr,
    fields_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    num_chunks,
    HAS_RANDOM: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per row."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    field_ptr = fields_ptr + row * 8
    found_ptr += row * num_chunks * 4
    chunks = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = chunks < num_chunks
    maxima = tl.where(is_chunk, load_found(found_ptr, chunks, 0, num_chunks), float("-inf"))
    choices = tl.load(found_ptr + chunks * 4 + 1, mask=is_chunk, other=NO_ID)
    values = load_found(found_ptr, chunks, 2, num_chunks)
    row_max = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == row_max, choices, NO_ID), axis=0)
    if HAS_RANDOM:
        temperature = tl.load(field_ptr).to(tl.float64, bitcast=True)
        if temperature > 0:
            bits = noise_bits(load_key(field_ptr), choices)
            scores = exact_score(values, row_max, temperature, bits)
            scores = tl.where(choices < NO_ID, scores, float("-inf"))
            best = tl.max(scores, axis=0)
            token = tl.min(tl.where(scores == best, choices, NO_ID), axis=0)
    tl.store(out_ids_ptr + row, token)
    if HAS_LOGPROBS:
        value = tl.max(tl.where(choices == token, values, float("-inf")), axis=0)
        sums = load_found(found_ptr, chunks, 3, num_chunks)
        log_sum = tl.log(tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E), axis=0))
        tl.store(out_logprobs_ptr + row, value - row_max - log_sum)
    tl.store(field_ptr + 6, tl.load(field_ptr + 6) + 1)


def count_chunks(num_ids: int) -> int:
    """Returns the chunks of a share."""
    return -(-num_ids // CHUNK)


def choose_in_share(
    logits_RN: Tensor,
    rows: DeviceSampling,
    found_RC4: Tensor,
    *,
    first_id: int,
    has_logprobs: bool,
    use_pdl: bool = False,
) -> None:
    """Finds the best token of each chunk.

    Args:
        logits_RN: float32, of consecutive tokens; contiguous within a row.
        rows: parameters of the first R rows, none of them with filters.
        found_RC4: int32, contiguous, overwritten; C may be more than the share has, the rest is
            marked as empty.
        first_id: of the share.
        has_logprobs: whether log-probabilities will be asked for.
        use_pdl: launch while the kernel before still runs.
    """
    num_rows, num_chunks, _ = found_RC4.shape
    kind = rows.kind_of(num_rows)
    assert kind != RowKind.FILTERED
    assert logits_RN.stride(1) == 1
    assert found_RC4.is_contiguous()
    assert count_chunks(logits_RN.shape[1]) <= num_chunks
    choose_in_share_kernel[(num_chunks, num_rows)](
        logits_RN,
        rows.fields,
        found_RC4,
        logits_RN.stride(0),
        logits_RN.shape[1],
        first_id,
        HAS_RANDOM=kind != RowKind.GREEDY,
        HAS_LOGPROBS=has_logprobs,
        BLOCK=CHUNK,
        USE_PDL=use_pdl,
        **launch_options(4, use_pdl=use_pdl),
    )


def join_shares(
    found_RC4: Tensor,
    rows: DeviceSampling,
    out_ids_R: Tensor,
    out_logprobs_R: Tensor | None,
    *,
    use_pdl: bool = False,
) -> None:
    """Chooses each row's token among what all ranks found, and counts up its output index.

    Args:
        found_RC4: int32, contiguous: the chunks of all ranks.
        rows: as in `choose_in_share`.
        out_ids_R: int32, overwritten.
        out_logprobs_R: float32, overwritten with the log-probability of each choice under the raw
            logits; None spares the work.
        use_pdl: launch while the kernel before still runs.
    """
    num_rows, num_chunks, _ = found_RC4.shape
    assert found_RC4.is_contiguous()
    join_shares_kernel[(num_rows,)](
        found_RC4,
        rows.fields,
        out_ids_R,
        rows.stats if out_logprobs_R is None else out_logprobs_R,
        num_chunks,
        HAS_RANDOM=rows.kind_of(num_rows) != RowKind.GREEDY,
        HAS_LOGPROBS=out_logprobs_R is not None,
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        USE_PDL=use_pdl,
        **launch_options(1, use_pdl=use_pdl),
    )
