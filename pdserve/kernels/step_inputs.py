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
):
    """A fixed number of programs share rows and updates, however many there are."""
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
) -> None:
    """Fills in token ids and writes table entries; the first kernel of a step.

    No later kernel may start before it has ended: some read lengths and tables before they wait for
    the kernel ahead of them.

    Args:
        sources_M: int32; a token id, or -(row + 1) for what the step before sampled in a row.
        previous_ids: int32 or int64; what the step before sampled.
        token_ids_M: int32, written.
        updates: int32; the number of updates, three unused values, then pairs of a flat index into
            `tables` and its new value. No index stands twice.
        tables: int32, contiguous, fewer than 2**31 entries.
    """
    step_inputs_kernel[(NUM_PROGRAMS,)](
        sources_M,
        previous_ids,
        token_ids_M,
        sources_M.shape[0],
        updates,
        tables,
        BLOCK=BLOCK,
        NUM_PROGRAMS=NUM_PROGRAMS,
        num_warps=4,
    )
