"""Turns a step plan into the tensors that a model computes from."""

from itertools import pairwise

import torch

from pdserve.config.engine import ATTENTION_TILE_TOKENS
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.layers.attention import ForwardBatch, OutputRow, SequenceRows, TileRows


def build_batch(plan: StepPlan, block_size: int) -> ForwardBatch:
    """Lays the slices of a plan out in rows, one per token.

    Raises:
        ValueError: a slice is empty, or its block table is too short.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    sequences: list[SequenceRows] = []
    for part in plan.slices:
        _check(part, block_size)
        sequences.append(_sequence_rows(part, len(token_ids), block_size))
        token_ids.extend(part.token_ids)
        positions.extend(range(part.start, part.end))
        for position in range(part.start, part.end):
            block_id = part.block_ids[position // block_size]
            slots.append(block_id * block_size + position % block_size)
        first_row = len(token_ids) - len(part.token_ids)
        sample_rows.extend(range(first_row, first_row + len(part.prompt_targets)))
        if part.output_index is not None:
            sample_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        sequences=tuple(sequences),
        block_size=block_size,
    )


def _check(part: SequenceSlice, block_size: int) -> None:
    request_id = part.request.request_id
    if not part.token_ids:
        raise ValueError(f"request {request_id} has an empty slice")
    if len(part.prompt_targets) > len(part.token_ids):
        raise ValueError(f"request {request_id} has more targets than tokens")
    if len(part.block_ids) * block_size < part.end:
        raise ValueError(
            f"request {request_id} needs blocks for {part.end} tokens, "
            f"got {len(part.block_ids)} of {block_size}"
        )


def _sequence_rows(part: SequenceSlice, first_row: int, block_size: int) -> SequenceRows:
    prompt_end = min(part.request.num_prompt_tokens, part.end)
    tiles: list[TileRows] = []
    start = part.start
    while start < prompt_end:
        tile_start = start - start % ATTENTION_TILE_TOKENS
        tile_end = tile_start + ATTENTION_TILE_TOKENS
        end = min(tile_end, prompt_end)
        row = first_row + start - part.start
        tiles.append(
            TileRows(
                first_row=row,
                last_row=row + end - start,
                offset=start - tile_start,
                num_kv=tile_end,
            )
        )
        start = end
    outputs = tuple(
        OutputRow(row=first_row + position - part.start, num_kv=position + 1)
        for position in range(start, part.end)
    )
    num_kv = max(
        tiles[-1].num_kv if tiles else 0,
        outputs[-1].num_kv if outputs else 0,
    )
    used = part.block_ids[: -(-part.end // block_size)]
    if all(later == earlier + 1 for earlier, later in pairwise(used)):
        first_slot, block_index = used[0] * block_size, None
    else:
        first_slot, block_index = None, torch.tensor(used, dtype=torch.int64)
    return SequenceRows(
        num_prompt_tokens=part.request.num_prompt_tokens,
        tiles=tuple(tiles),
        outputs=outputs,
        num_kv=num_kv,
        num_written=part.end,
        first_slot=first_slot,
        block_index=block_index,
    )
