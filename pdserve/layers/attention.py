"""Attention of one step: which rows of the batch attend to which KV.

Letters as in `pdserve.kernels.reference`; M is rows of the batch, one per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.reference import attend_row, attend_tile, gather_blocks, make_tile_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """How far back the tokens of a layer see."""

    tile_mask: Tensor
    """Of `make_tile_mask`, long enough for the longest tile."""
    window: int | None = None
    """Tokens that each sees, itself included; None for all."""


def make_reach(window: int | None, max_kv_tokens: int, dtype: torch.dtype) -> Reach:
    """Returns the reach of a layer; a window as long as any sequence is none."""
    if window is not None and window >= max_kv_tokens:
        window = None
    return Reach(tile_mask=make_tile_mask(max_kv_tokens, dtype, window), window=window)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRows:
    """Prompt tokens of one tile."""

    first_row: int
    last_row: int
    """Exclusive."""
    offset: int
    """Place of the first token in its tile."""
    num_kv: int
    """KV tokens up to the tile's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputRow:
    """One output token."""

    row: int
    num_kv: int
    """KV tokens up to and with itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRows:
    """One sequence's tokens of a step and where its KV lies."""

    num_prompt_tokens: int
    """Of the whole request, whatever part of it is in this step."""
    tiles: tuple[TileRows, ...]
    outputs: tuple[OutputRow, ...]
    num_kv: int
    """The most KV tokens that any tile or row reads."""
    num_written: int
    """KV tokens that exist once this step's are written; a tile may end behind them."""
    first_slot: int | None
    """Where the KV starts if its blocks follow one another in memory; else None."""
    block_index: Tensor | None
    """int64 block ids that cover `num_written` tokens, if they do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """Everything the model needs to know of a step, in tensors."""

    token_ids: Tensor
    """int64 [M]."""
    positions: Tensor
    """int64 [M]."""
    slots: Tensor
    """int64 [M]; where each token's KV is written."""
    sample_rows: Tensor
    """int64 [num_sample_rows]; rows that go through the head: those that sample, and those of
    prompt tokens whose successor's log-probability is asked for."""
    sequences: tuple[SequenceRows, ...]
    block_size: int


def attend(
    q_MHD: Tensor, keys_SJD: Tensor, values_SJD: Tensor, batch: ForwardBatch, reach: Reach
) -> Tensor:
    """Attends for every row of the batch.

    Args:
        q_MHD: rotated queries.
        keys_SJD: all key slots of the layer, this step's tokens included.
        values_SJD: all value slots.
        batch: the step.
        reach: of the layer.

    Returns:
        [M, H, D].
    """
    num_rows, num_heads, head_dim = q_MHD.shape
    num_kv_heads = keys_SJD.shape[1]
    grouped = (num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # One call makes the views of all rows: a slice a row cost as much as a tenth of decoding.
    q_rows = q_MHD.view(grouped).chunk(num_rows) if any(s.outputs for s in batch.sequences) else ()
    num_columns = reach.tile_mask.shape[1]
    parts: list[Tensor] = []  # in the order of rows
    for sequence in batch.sequences:
        keys, values = _kv_of(sequence, keys_SJD, values_SJD, batch.block_size)
        for tile in sequence.tiles:
            start = max(0, tile.num_kv - num_columns)
            mask = reach.tile_mask[:, num_columns - (tile.num_kv - start) :]
            parts.append(
                attend_tile(
                    q_MHD[tile.first_row : tile.last_row],
                    keys[start : tile.num_kv],
                    values[start : tile.num_kv],
                    tile.offset,
                    mask,
                )
            )
        if not sequence.outputs:
            continue
        keys_1JSD, values_1JSD = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        for output in sequence.outputs:
            end = output.num_kv
            start = 0 if reach.window is None else max(0, end - reach.window)
            seen_keys, seen_values = keys_1JSD, values_1JSD
            if end - start < keys.shape[0]:
                seen_keys = keys_1JSD.narrow(2, start, end - start)
                seen_values = values_1JSD.narrow(2, start, end - start)
            out_1JGD = attend_row(q_rows[output.row], seen_keys, seen_values)
            parts.append(out_1JGD.view(1, num_heads, head_dim))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _kv_of(
    sequence: SequenceRows, keys_SJD: Tensor, values_SJD: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Returns KV of the sequence, zero from `num_written` on.

    A view where blocks follow one another, which spares the copy; else gathered. No slot that the
    sequence has not written is ever read, not even behind a mask: what an earlier owner left there
    might be no number at all, and zero times NaN is NaN.
    """
    if sequence.block_index is None:
        assert sequence.first_slot is not None
        span = slice(sequence.first_slot, sequence.first_slot + sequence.num_written)
        keys, values = keys_SJD[span], values_SJD[span]
    else:
        keys = gather_blocks(keys_SJD, sequence.block_index, block_size)[: sequence.num_written]
        values = gather_blocks(values_SJD, sequence.block_index, block_size)[: sequence.num_written]
    missing = sequence.num_kv - sequence.num_written
    if missing <= 0:
        return keys, values
    padding = (0, 0, 0, 0, 0, missing)
    return functional.pad(keys, padding), functional.pad(values, padding)
