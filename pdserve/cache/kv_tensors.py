"""The memory of KV blocks on one rank, and the packing of regions into frames.

Letters: L layer, K key or value, B block, S slot, T token, H KV head, D head dim.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.cache.kv_frame import FRAME_DTYPES, decode_values, encode_values
from pdserve.cache.kv_region import KvRegion
from pdserve.config.model import KvGeometry
from pdserve.config.shape import ITEM_BYTES, RankPart, count_frame_bytes
from pdserve.request import BlockId

TORCH_DTYPES = {name: FRAME_DTYPES[name] for name in ITEM_BYTES}
"""Of KV in memory."""


class KvTensors:
    """KV blocks of a rank's layers and heads in one tensor. Only the model's thread may use it.

    On a GPU, frames are packed and scattered by `pdserve.cuda.kv_traffic`; `pack` and `scatter`
    do the same in plain torch.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        num_blocks: int,
        part: RankPart | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Allocates `num_blocks` zeroed blocks.

        Args:
            geometry: of the whole replica.
            num_blocks: the same on all its ranks.
            part: what this rank holds; None is the first rank's.
            device: where; None is host memory.
        """
        assert num_blocks >= 1
        self.geometry = geometry
        self.device = torch.device("cpu") if device is None else device
        self.num_blocks = num_blocks
        self.part = geometry.parts[0] if part is None else part
        shape = (
            len(self.part.layers),
            2,
            num_blocks,
            geometry.block_size,
            len(self.part.kv_heads),
            geometry.head_dim,
        )
        dtype = TORCH_DTYPES[geometry.dtype]
        if self.device.type == "cpu":
            self._blocks_LKBSHD = _make_zeros(shape, dtype)
        else:
            self._blocks_LKBSHD = torch.zeros(shape, dtype=dtype, device=self.device)
        # Made once: two views a layer and step took 1 % of decoding one sequence.
        self._layers = tuple(
            (part[0].flatten(0, 1), part[1].flatten(0, 1)) for part in self._blocks_LKBSHD
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer as views, [num_slots, rank's KV heads, head_dim].

        Args:
            index: counts this rank's layers.
        """
        return self._layers[index]

    def frame_bytes(self, region: KvRegion) -> int:
        """Returns the size of a frame."""
        num_rows = 2 * region.num_tokens * len(region.layers) * len(region.heads)
        return count_frame_bytes(num_rows, self.geometry.head_dim, region.dtype)

    def pack(self, region: KvRegion) -> Tensor:
        """Copies a region into a new frame in layout LKTHD.

        Returns:
            uint8 [frame_bytes], in host memory.

        Raises:
            ValueError: the region reaches beyond this rank's memory.
        """
        slots, index = self._select(region)
        return encode_values(slots.index_select(2, index), region.dtype).cpu()

    def scatter(self, region: KvRegion, payload: Tensor) -> None:
        """Writes a frame made by `pack` into a region; no other slot is touched.

        Args:
            region: where it goes; its blocks are all different.
            payload: uint8 [frame_bytes], any alignment.

        Raises:
            ValueError: the region reaches beyond this rank's memory, a block is named twice, or
                the payload has another size or type.
        """
        self.check_target(region, payload)
        slots, index = self._select(region)
        shape = (*slots.shape[:2], len(index), *slots.shape[3:])
        values = decode_values(payload.to(self.device), shape, region.dtype)
        slots.index_copy_(2, index, values.to(slots.dtype))

    def check_target(self, region: KvRegion, payload: Tensor) -> None:
        """Checks that a frame may be written to a region.

        Raises:
            ValueError: a block is named twice, or the payload has another size or type.
        """
        if len(set(region.block_ids)) != len(region.block_ids):
            raise ValueError("a frame cannot write one block twice")
        expected_bytes = self.frame_bytes(region)
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise ValueError(f"payload must be 1-D uint8, got {payload.dim()}-D {payload.dtype}")
        if payload.numel() != expected_bytes:
            raise ValueError(f"payload must be {expected_bytes} bytes, got {payload.numel()}")

    def check_region(self, region: KvRegion) -> None:
        """Checks that a region lies in this rank's memory.

        Raises:
            ValueError: it reaches beyond.
        """
        self._check_blocks(region.block_ids)
        _within(region.layers, self.part.layers, "layers")
        _within(region.heads, self.part.kv_heads, "heads")
        size = self.geometry.block_size
        room = len(region.block_ids) * size
        end = region.offset + region.num_tokens
        if not (0 <= region.offset < size and room - size < end <= room and region.num_tokens > 0):
            raise ValueError(
                f"{region.num_tokens} tokens from slot {region.offset} on do not lie in "
                f"{len(region.block_ids)} blocks of {size}"
            )

    def view(self, region: KvRegion) -> Tensor:
        """Returns all blocks, of a region's layers and heads only: LKBSHD.

        Raises:
            ValueError: the region reaches beyond this rank's memory.
        """
        self.check_region(region)
        layers = _within(region.layers, self.part.layers, "layers")
        heads = _within(region.heads, self.part.kv_heads, "heads")
        return self._blocks_LKBSHD[layers.start : layers.stop, ..., heads.start : heads.stop, :]

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copies one block over all layers.

        Raises:
            ValueError: a block id is out of range.
        """
        self._check_blocks((source, target))
        self._blocks_LKBSHD[:, :, target] = self._blocks_LKBSHD[:, :, source]

    def _select(self, region: KvRegion) -> tuple[Tensor, Tensor]:
        """Returns a view of the region's layers and heads, and what to pick along its third axis.

        Whole blocks are picked as such: longer runs to copy, and no index per token.
        """
        values = self.view(region)
        size = self.geometry.block_size
        index = torch.tensor(region.block_ids, dtype=torch.int64)
        if region.num_tokens < len(region.block_ids) * size:
            end = region.offset + region.num_tokens
            values = values.flatten(2, 3)
            index = (index[:, None] * size + torch.arange(size)).flatten()[region.offset : end]
        return values, index.to(self.device)

    def _check_blocks(self, block_ids: Sequence[BlockId]) -> None:
        if not block_ids:
            raise ValueError("no block is named")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id must be in [0, {self.num_blocks}), got {block_id}")


def _within(wanted: range, held: range, name: str) -> range:
    """Returns a range of the model as one of the rank."""
    is_inside = held.start <= wanted.start < wanted.stop <= held.stop
    if not is_inside or wanted.step != 1:
        raise ValueError(f"{name} must lie in [{held.start}, {held.stop}), got {wanted}")
    return range(wanted.start - held.start, wanted.stop - held.start)


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeroed memory that the kernel maps page by page as it is first written.

    `torch.zeros` writes all of it: half a gigabyte takes 0.2-0.5 s and counts as resident at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
