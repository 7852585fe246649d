"""Rotary position embeddings (Su et al., 2021), in the half-split form of Hugging Face models."""

import torch
from torch import Tensor

from pdserve.config.rope import DynamicScaling, RopeScaling
from pdserve.layers.attention import ForwardBatch, SequenceRows
from pdserve.layers.rope_scaling import make_frequencies, stretch_frequencies

TABLE_ROWS_MULTIPLE = 64
"""Tables of different lengths agree bit for bit: a vector kernel's tail may round differently."""


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
        factor = frequencies.attention_factor
        self._cos = (angles.cos() * factor).to(dtype)  # [num_rows, head_dim / 2]
        self._sin = (angles.sin() * factor).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each [M, 1, head_dim / 2]."""
        cos = self._cos.index_select(0, positions).unsqueeze(1)
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        return cos, sin

    def of_batch(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of every row, those of long sequences stretched."""
        cos, sin = self.at(batch.positions)
        if self._dynamic is not None:
            for sequence in batch.sequences:
                self._stretch(sequence, self._dynamic, cos, sin)
        return cos, sin

    def _stretch(
        self, sequence: SequenceRows, scaling: DynamicScaling, cos: Tensor, sin: Tensor
    ) -> None:
        """Overwrites rows of a sequence that is longer than the original context."""
        if sequence.num_prompt_tokens > scaling.original_max_position:
            for tile in sequence.tiles:
                rows = slice(tile.first_row, tile.last_row)
                first = tile.num_kv - TABLE_ROWS_MULTIPLE + tile.offset
                part = self._stretched(scaling, sequence.num_prompt_tokens, first, rows)
                cos[rows, 0], sin[rows, 0] = part
        for output in sequence.outputs:
            if output.num_kv > scaling.original_max_position:
                rows = slice(output.row, output.row + 1)
                part = self._stretched(scaling, output.num_kv, output.num_kv - 1, rows)
                cos[rows, 0], sin[rows, 0] = part

    def _stretched(
        self, scaling: DynamicScaling, num_tokens: int, position: int, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of consecutive positions, computed in a whole tile."""
        inverse = stretch_frequencies(self._head_dim, self._theta, scaling, num_tokens)
        offset = position % TABLE_ROWS_MULTIPLE
        positions = torch.arange(position - offset, position - offset + TABLE_ROWS_MULTIPLE)
        angles = torch.outer(positions.float(), inverse)
        wanted = slice(offset, offset + rows.stop - rows.start)
        return angles.cos()[wanted].to(self._dtype), angles.sin()[wanted].to(self._dtype)


def rotate(x_MHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with each head turned by its token's angles."""
    first, second = x_MHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
