"""Chooses tokens on the device: the same tokens as `pdserve.sampler` for the same logits.

One launch (`choice`) serves greedy rows and rows without filters. Rows with top-k, top-p or min-p
go on to `filters`, a ranking of the most likely tokens, and those that keep more tokens than it can
rank to `vocabulary_search`.

Among equal logits at the edge of a top-k or top-p set the lowest ids are kept, here and on the CPU.
The choice can differ only where a cumulative probability equals top-p to the last bits and falls on
the other side.

Letters: R rows, V vocabulary.
"""

import triton
from torch import Tensor

from pdserve.kernels.choice import choose_kernel
from pdserve.kernels.filters import filter_kernel
from pdserve.kernels.launch import launch_options
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

SEARCH_BLOCK = 4096
"""Tokens that a program of the search reads at a time."""
SEARCH_WARPS = 32
"""Of an H200's sweep the quickest at 1, 64 and 256 rows, by 3, 4 and 15 % over 16."""


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
        rows.candidates,
        rows.is_wide,
        out_ids_R,
        logprobs,
        logits_RV.stride(0),
        rows.vocab_size,
        rows.candidates.stride(0),
        HAS_LOGPROBS=out_logprobs_R is not None,
        SHIFT=shift,
        BLOCK=SEARCH_BLOCK,
        NUM_TILES=triton.cdiv(rows.vocab_size, SEARCH_BLOCK),
        USE_PDL=use_pdl,
        **launch_options(SEARCH_WARPS, use_pdl=use_pdl),
    )


def key_shift(logits: Tensor) -> int:
    """Returns how many bits of a float32 the logits' dtype leaves zero."""
    return {"torch.bfloat16": 16, "torch.float16": 13}.get(str(logits.dtype), 0)
