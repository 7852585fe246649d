"""Regions and contents of KV memory, for tests."""

from collections.abc import Sequence

import torch

from pdserve.cache.kv_region import KvRegion
from pdserve.cache.kv_tensors import KvTensors
from pdserve.request import BlockId


def whole_blocks(
    kv: KvTensors,
    block_ids: Sequence[int],
    layers: range | None = None,
    heads: range | None = None,
    dtype: str | None = None,
) -> KvRegion:
    """Names whole blocks, in everything that the rank holds unless told."""
    return KvRegion(
        block_ids=tuple(BlockId(block) for block in block_ids),
        offset=0,
        num_tokens=len(block_ids) * kv.geometry.block_size,
        layers=kv.part.layers if layers is None else layers,
        heads=kv.part.kv_heads if heads is None else heads,
        dtype=dtype or kv.geometry.dtype,
    )


def fill(kv: KvTensors, seed: int = 0) -> KvTensors:
    """Draws every slot."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(kv.part.layers)):
        for half in kv.layer(layer):
            half.copy_(torch.randn(half.shape, generator=generator))
    return kv
