"""Takes what the host sent for a step: tokens that only the device knows, and new table entries.

Letters: M rows.
"""

import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 8
BLOCK = 512


@triton.jit
def step_inputs_kernel(
    sources_ptr,
    previous_ids_ptr,
    token_ids_ptr,
    num_rows,
    updates_ptr,
    tables_ptr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A fixed number of programs share rows and updates, however many there are."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    for start in range(program * BLOCK, num_rows, NUM_PROGRAMS * BLOCK):
        row = start + lanes
        is_inside = row < num_rows
        source = tl.load(sources_ptr + row, mask=is_inside, other=0)
        is_awaited = is_inside & (source < 0)
        known = tl.load(previous_ids_ptr - source - 1, mask=is_awaited, other=0).to(tl.int32)
        tl.store(token_ids_ptr + row, tl.where(is_awaited, known, source), mask=is_inside)
    num_updates = tl.load(updates_ptr)
    for start in range(program * BLOCK, num_updates, NUM_PROGRAMS * BLOCK):
        update = start + lanes
        is_inside = update < num_updates
        place = tl.load(updates_ptr + 4 + 2 * update, mask=is_inside, other=0)
        value = tl.load(updates_ptr + 5 + 2 * update, mask=is_inside, other=0)
        tl.store(tables_ptr + place, value, mask=is_inside)


def take_step_inputs(
    sources_M: Tensor,
    previous_ids: Tensor,
    token_ids_M: Tensor,
    updates: Tensor,
    tables: Tensor,
    *,
    use_pdl: bool = False,
) -> None:
    """Fills in token ids and writes table entries.

    Args:
        sources_M: int32; a token id, or -(row + 1) for what the step before sampled in a row.
        previous_ids: int32 or int64; what the step before sampled.
        token_ids_M: int32, written.
        updates: int32; the number of updates, three unused values, then pairs of a flat index into
            `tables` and its new value. No index stands twice.
        tables: int32, contiguous, fewer than 2**31 entries.
        use_pdl: whether the launch may begin before the kernel ahead of it has ended (sm_90).
    """
    options = {"launch_pdl": True} if use_pdl else {}
    step_inputs_kernel[(NUM_PROGRAMS,)](
        sources_M,
        previous_ids,
        token_ids_M,
        sources_M.shape[0],
        updates,
        tables,
        BLOCK=BLOCK,
        NUM_PROGRAMS=NUM_PROGRAMS,
        USE_PDL=use_pdl,
        num_warps=4,
        **options,
    )
