"""Rotary position embeddings (Su et al., 2021), in the half-split form of Hugging Face models."""

import torch
from torch import Tensor

TABLE_ROWS_MULTIPLE = 64
"""Tables of different lengths agree bit for bit: a vector kernel's tail may round differently."""


class RotaryEmbedding:
    """Tables of cosines and sines for every position."""

    def __init__(self, head_dim: int, theta: float, max_position: int, dtype: torch.dtype) -> None:
        """Computes the tables in float32 and keeps them in `dtype`."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse_frequencies = 1.0 / (theta**exponents)
        num_rows = -(-max_position // TABLE_ROWS_MULTIPLE) * TABLE_ROWS_MULTIPLE
        angles = torch.outer(torch.arange(num_rows).float(), inverse_frequencies)
        self._cos = angles.cos().to(dtype)  # [num_rows, head_dim / 2]
        self._sin = angles.sin().to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each [M, 1, head_dim / 2]."""
        cos = self._cos.index_select(0, positions).unsqueeze(1)
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        return cos, sin


def rotate(x_MHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with each head turned by its token's angles."""
    first, second = x_MHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
