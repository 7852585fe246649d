"""Rotary position embeddings (Su et al., 2021), in the half-split form of Hugging Face models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.config.rope import DynamicScaling, RopeScaling
from pdserve.layers.attention import ForwardBatch, SequenceRows
from pdserve.layers.rope_scaling import make_frequencies, stretch_frequencies

TABLE_ROWS_MULTIPLE = 64
"""Tables of different lengths agree bit for bit: a vector kernel's tail may round differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """By what each row of a batch is rotated; whole heads, so that few operations do it."""

    cos: Tensor
    """[M, 1, head_dim], the same for both halves."""
    sin: Tensor
    """[M, 1, head_dim], negative in the first half."""


class RotaryEmbedding:
    """Tables of cosines and sines for every position."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        max_position: int,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> None:
        """Computes the tables in float32 and keeps them in `dtype`."""
        self._head_dim = head_dim
        self._theta = theta
        self._dtype = dtype
        self._dynamic = scaling if isinstance(scaling, DynamicScaling) else None
        frequencies = make_frequencies(head_dim, theta, scaling)
        num_rows = -(-max_position // TABLE_ROWS_MULTIPLE) * TABLE_ROWS_MULTIPLE
        angles = torch.outer(torch.arange(num_rows).float(), frequencies.inverse)
        self._tables = _tables(angles, frequencies.attention_factor, dtype)

    def at(self, positions: Tensor) -> Turns:
        """Returns the turns of positions."""
        cos, sin = self._tables
        return Turns(
            cos=cos.index_select(0, positions).unsqueeze(1),
            sin=sin.index_select(0, positions).unsqueeze(1),
        )

    def of_batch(self, batch: ForwardBatch) -> Turns:
        """Returns the turns of every row, those of long sequences stretched."""
        turns = self.at(batch.positions)
        if self._dynamic is not None:
            for sequence in batch.sequences:
                self._stretch(sequence, self._dynamic, turns)
        return turns

    def _stretch(self, sequence: SequenceRows, scaling: DynamicScaling, turns: Turns) -> None:
        """Overwrites rows of a sequence that is longer than the original context."""
        if sequence.num_prompt_tokens > scaling.original_max_position:
            for tile in sequence.tiles:
                rows = slice(tile.first_row, tile.last_row)
                first = tile.num_kv - TABLE_ROWS_MULTIPLE + tile.offset
                self._overwrite(turns, rows, first, scaling, sequence.num_prompt_tokens)
        for output in sequence.outputs:
            if output.num_kv > scaling.original_max_position:
                rows = slice(output.row, output.row + 1)
                self._overwrite(turns, rows, output.num_kv - 1, scaling, output.num_kv)

    def _overwrite(
        self, turns: Turns, rows: slice, position: int, scaling: DynamicScaling, num_tokens: int
    ) -> None:
        """Writes the turns of consecutive positions of one tile, computed for the whole tile."""
        inverse = stretch_frequencies(self._head_dim, self._theta, scaling, num_tokens)
        offset = position % TABLE_ROWS_MULTIPLE
        positions = torch.arange(position - offset, position - offset + TABLE_ROWS_MULTIPLE)
        cos, sin = _tables(torch.outer(positions.float(), inverse), 1.0, self._dtype)
        wanted = slice(offset, offset + rows.stop - rows.start)
        turns.cos[rows, 0], turns.sin[rows, 0] = cos[wanted], sin[wanted]


def _tables(angles: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x_MHD: Tensor, turns: Turns) -> Tensor:
    """Returns x with each head turned by its token's angles."""
    first, second = x_MHD.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x_MHD * turns.cos).addcmul_(swapped, turns.sin)
