"""The memory of activations: allocated once, so that graphs and accounting can rely on it.

A kernel's output lies where the kernel after next will write its own: the chain of a step uses one
buffer per kind, whatever the number of layers.

Letters: M rows, E hidden size, N outputs, S splits of a product, H heads, D head dim, R sampled
rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceSize:
    """How much a workspace holds."""

    max_rows: int
    """Tokens of one step, padding included."""
    max_sample_rows: int
    """Rows of logits at a time."""
    max_product_bytes: int
    """Output of the largest product but the head's, split sums included."""
    logits_columns: int
    """Of this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBuffers:
    """Views of a workspace for so many rows."""

    residual_ME: Tensor
    normed_ME: Tensor
    q_MHD: Tensor
    heads_MHD: Tensor
    inner_MN: Tensor


class Workspace:
    """All buffers between the kernels of a step. Steps on one stream share them."""

    def __init__(
        self, config: ModelConfig, size: WorkspaceSize, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates."""
        rows, hidden = size.max_rows, config.hidden_size
        heads = (rows, config.num_heads, config.head_dim)
        self.dtype = dtype
        self.size = size
        self._residual = torch.empty((rows, hidden), dtype=dtype, device=device)
        self._normed = torch.empty((rows, hidden), dtype=dtype, device=device)
        self._q = torch.empty(heads, dtype=dtype, device=device)
        self._heads = torch.empty(heads, dtype=dtype, device=device)
        self._inner = torch.empty((rows, config.intermediate_size), dtype=dtype, device=device)
        self._product = torch.empty(size.max_product_bytes, dtype=torch.uint8, device=device)
        samples = size.max_sample_rows
        self._picked = torch.empty((2, samples, hidden), dtype=dtype, device=device)
        self._picked_heads = torch.empty((2, samples, *heads[1:]), dtype=dtype, device=device)
        shape = (samples, size.logits_columns)
        self._logits = torch.empty(shape, dtype=torch.float32, device=device)
        self._all_logits = self._logits
        if size.logits_columns < config.vocab_size:
            shape = (samples, config.vocab_size)
            self._all_logits = torch.empty(shape, dtype=torch.float32, device=device)

    def rows(self, num_rows: int) -> RowBuffers:
        """Returns the buffers of a step's rows."""
        assert num_rows <= self.size.max_rows
        return RowBuffers(
            residual_ME=self._residual[:num_rows],
            normed_ME=self._normed[:num_rows],
            q_MHD=self._q[:num_rows],
            heads_MHD=self._heads[:num_rows],
            inner_MN=self._inner[:num_rows],
        )

    def picked(self, num_rows: int, inner_MN: Tensor) -> RowBuffers:
        """Returns buffers for the few rows that sample, which go on alone from some point."""
        assert num_rows <= self.size.max_sample_rows
        return RowBuffers(
            residual_ME=self._picked[0, :num_rows],
            normed_ME=self._picked[1, :num_rows],
            q_MHD=self._picked_heads[0, :num_rows],
            heads_MHD=self._picked_heads[1, :num_rows],
            inner_MN=inner_MN[:num_rows],
        )

    def product(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Returns room for a product's output, [S, M, N]."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert num_bytes <= self.size.max_product_bytes
        return self._product[:num_bytes].view(dtype).view(shape)

    def logits(self, num_rows: int) -> Tensor:
        """Returns room for this rank's logits, float32."""
        assert num_rows <= self.size.max_sample_rows
        return self._logits[:num_rows]

    def all_logits(self, num_rows: int) -> Tensor:
        """Returns room for the logits of all ranks, float32 [R, V]."""
        assert num_rows <= self.size.max_sample_rows
        return self._all_logits[:num_rows]

    @property
    def num_bytes(self) -> int:
        """All that was allocated."""
        buffers = (
            self._residual,
            self._normed,
            self._q,
            self._heads,
            self._inner,
            self._product,
            self._picked,
            self._picked_heads,
            self._logits,
        )
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        is_shared = self._all_logits is self._logits
        return num_bytes + (0 if is_shared else self._all_logits.nbytes)
