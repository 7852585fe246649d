"""The memory of KV blocks on one rank, and the packing of blocks into frames.

Letters: L layer, K key or value, B block, S slot, H KV head, D head dim.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.config.model import KvGeometry
from pdserve.request import BlockId

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvTensors:
    """KV blocks of all layers in one tensor. Only the thread that owns the model may use it."""

    def __init__(self, geometry: KvGeometry, num_blocks: int) -> None:
        """Allocates `num_blocks` zeroed blocks."""
        assert num_blocks >= 1
        self.geometry = geometry
        self.num_blocks = num_blocks
        shape = (
            geometry.num_layers,
            2,
            num_blocks,
            geometry.block_size,
            geometry.num_kv_heads,
            geometry.head_dim,
        )
        self._blocks_LKBSHD = _make_zeros(shape, TORCH_DTYPES[geometry.dtype])
        # Made once: two views a layer and step took 1 % of decoding one sequence.
        self._layers = tuple(
            (part[0].flatten(0, 1), part[1].flatten(0, 1)) for part in self._blocks_LKBSHD
        )

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer as views, [num_slots, num_kv_heads, head_dim]."""
        return self._layers[layer]

    def frame_bytes(self, num_blocks: int, num_layers: int) -> int:
        """Returns the size of a frame of so many blocks over so many layers."""
        per_layer = self.geometry.bytes_per_block // self.geometry.num_layers
        return num_blocks * num_layers * per_layer

    def pack(self, block_ids: Sequence[BlockId], layers: range) -> Tensor:
        """Copies blocks into a new frame in layout LKBSHD.

        Returns:
            uint8 [frame_bytes].

        Raises:
            ValueError: a block id or layer is out of range.
        """
        selected = self._select(block_ids, layers)
        index = torch.tensor(block_ids, dtype=torch.int64)
        return selected.index_select(2, index).view(-1).view(torch.uint8)

    def scatter(self, block_ids: Sequence[BlockId], layers: range, payload: Tensor) -> None:
        """Writes a frame made by `pack` into blocks; whole blocks only.

        Args:
            block_ids: where each block of the frame goes, all different.
            layers: the layers that the frame holds.
            payload: uint8 [frame_bytes], any alignment.

        Raises:
            ValueError: a block id or layer is out of range, a block is named twice, or the
                payload has another size or type.
        """
        selected = self._select(block_ids, layers)
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a frame cannot write one block twice")
        expected_bytes = self.frame_bytes(len(block_ids), len(layers))
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise ValueError(f"payload must be 1-D uint8, got {payload.dim()}-D {payload.dtype}")
        if payload.numel() != expected_bytes:
            raise ValueError(f"payload must be {expected_bytes} bytes, got {payload.numel()}")
        index = torch.tensor(block_ids, dtype=torch.int64)
        shape = (len(layers), 2, len(block_ids), *selected.shape[3:])
        item_bytes = self.geometry.item_bytes
        is_aligned = payload.is_contiguous() and payload.data_ptr() % item_bytes == 0
        aligned = payload if is_aligned else payload.clone(memory_format=torch.contiguous_format)
        source = aligned.view(selected.dtype).view(shape)
        selected.index_copy_(2, index, source)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copies one block over all layers.

        Raises:
            ValueError: a block id is out of range.
        """
        self._select((source, target), range(self.geometry.num_layers))
        self._blocks_LKBSHD[:, :, target] = self._blocks_LKBSHD[:, :, source]

    def _select(self, block_ids: Sequence[BlockId], layers: range) -> Tensor:
        if not block_ids:
            raise ValueError("no block is named")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id must be in [0, {self.num_blocks}), got {block_id}")
        is_inside = 0 <= layers.start < layers.stop <= self.geometry.num_layers
        if not is_inside or layers.step != 1:
            raise ValueError(f"layers must lie in [0, {self.geometry.num_layers}), got {layers}")
        return self._blocks_LKBSHD[layers.start : layers.stop]


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeroed memory that the kernel maps page by page as it is first written.

    `torch.zeros` writes all of it: half a gigabyte takes 0.2-0.5 s and counts as resident at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
