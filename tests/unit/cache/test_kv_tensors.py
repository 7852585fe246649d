import pytest
import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.request import BlockId


def geometry_with(**over: object) -> KvGeometry:
    fields: dict[str, object] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 4,
        "block_size": 16,
        "dtype": "float32",
        "model_revision": "r",
    }
    return KvGeometry(**(fields | over))  # type: ignore[arg-type]  # overrides of test fields


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in ids)


def filled(geometry: KvGeometry, num_blocks: int, seed: int = 0) -> KvTensors:
    kv = KvTensors(geometry, num_blocks)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(geometry.num_layers):
        for part in kv.layer(layer):
            part.copy_(torch.randn(part.shape, generator=generator))
    return kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_frame_scatters_to_the_same_values_elsewhere(dtype: str) -> None:
    geometry = geometry_with(dtype=dtype)
    source, target = filled(geometry, 8), KvTensors(geometry, 10)
    target.scatter(blocks(9, 0, 4), range(3), source.pack(blocks(2, 7, 3), range(3)))
    for layer in range(3):
        for sent, landed in zip(source.layer(layer), target.layer(layer), strict=True):
            for old, new in ((2, 9), (7, 0), (3, 4)):
                old_slots, new_slots = (
                    slice(old * 16, old * 16 + 16),
                    slice(new * 16, new * 16 + 16),
                )
                assert torch.equal(sent[old_slots], landed[new_slots])


def test_a_scatter_leaves_other_blocks_and_layers_alone() -> None:
    geometry = geometry_with()
    source, target = filled(geometry, 4), filled(geometry, 4, seed=1)
    before = target.pack(blocks(0, 2, 3), range(3)), target.pack(blocks(1), range(1))
    target.scatter(blocks(1), range(1, 3), source.pack(blocks(0), range(1, 3)))
    after = target.pack(blocks(0, 2, 3), range(3)), target.pack(blocks(1), range(1))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert torch.equal(target.pack(blocks(1), range(1, 3)), source.pack(blocks(0), range(1, 3)))


def test_a_frame_lies_in_the_order_layer_kv_block_slot_head_dim() -> None:
    geometry = geometry_with(num_layers=2, num_kv_heads=1, head_dim=2, block_size=1)
    kv = KvTensors(geometry, 2)
    for layer in range(2):
        for place, part in enumerate(kv.layer(layer)):
            for block in range(2):
                base = 100 * layer + 10 * place + block
                part[block, 0] = torch.tensor([base, base + 0.5])
    frame = kv.pack(blocks(1, 0), range(2)).view(torch.float32).tolist()
    bases = [1, 0, 11, 10, 101, 100, 111, 110]
    assert frame == [value for base in bases for value in (base, base + 0.5)]


def test_a_frame_has_the_size_that_the_geometry_says() -> None:
    geometry = geometry_with(dtype="bfloat16")
    kv = KvTensors(geometry, 4)
    frame = kv.pack(blocks(0, 1), range(3))
    assert frame.numel() == 2 * geometry.bytes_per_block == kv.frame_bytes(2, 3)
    assert frame.dtype == torch.uint8
    assert kv.frame_bytes(2, 1) * 3 == kv.frame_bytes(2, 3)


def test_a_frame_may_start_at_an_odd_address() -> None:
    geometry = geometry_with()
    source, target = filled(geometry, 2), KvTensors(geometry, 2)
    frame = source.pack(blocks(0), range(3))
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), frame))[1:]
    target.scatter(blocks(1), range(3), shifted)
    assert torch.equal(target.pack(blocks(1), range(3)), frame)


def test_a_frame_is_a_copy() -> None:
    kv = filled(geometry_with(), 2)
    frame = kv.pack(blocks(0), range(3))
    before = frame.clone()
    kv.copy_block(BlockId(1), BlockId(0))
    assert torch.equal(frame, before)


def test_copy_block_copies_all_layers() -> None:
    kv = filled(geometry_with(), 3)
    kv.copy_block(BlockId(2), BlockId(0))
    assert torch.equal(kv.pack(blocks(0), range(3)), kv.pack(blocks(2), range(3)))


def test_new_memory_is_zero() -> None:
    kv = KvTensors(geometry_with(block_size=8), 2)
    keys, values = kv.layer(1)
    assert keys.shape == values.shape == (2 * 8, 2, 4)
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize(
    ("ids", "layers", "message"),
    [
        ((), range(3), "no block"),
        ((4,), range(3), r"block id must be in \[0, 4\), got 4"),
        ((-1,), range(3), "got -1"),
        ((0,), range(2, 2), "layers must lie"),
        ((0,), range(1, 4), "layers must lie"),
        ((0,), range(0, 3, 2), "layers must lie"),
        ((0,), range(-1, 1), "layers must lie"),
    ],
)
def test_pack_refuses_blocks_and_layers_out_of_range(
    ids: tuple[int, ...], layers: range, message: str
) -> None:
    kv = KvTensors(geometry_with(), 4)
    with pytest.raises(ValueError, match=message):
        kv.pack(blocks(*ids), layers)


@pytest.mark.parametrize("extra", [-1, 1, -4])
def test_A9_scatter_refuses_a_frame_of_another_size_and_writes_nothing(extra: int) -> None:
    kv = filled(geometry_with(), 4)
    before = kv.pack(blocks(0, 1, 2, 3), range(3))
    payload = torch.zeros(kv.frame_bytes(1, 3) + extra, dtype=torch.uint8)
    with pytest.raises(ValueError, match="payload must be"):
        kv.scatter(blocks(1), range(3), payload)
    assert torch.equal(kv.pack(blocks(0, 1, 2, 3), range(3)), before)


def test_scatter_refuses_other_types_and_double_blocks() -> None:
    kv = KvTensors(geometry_with(), 4)
    with pytest.raises(ValueError, match="1-D uint8"):
        kv.scatter(blocks(1), range(3), torch.zeros(kv.frame_bytes(1, 3) // 4))
    with pytest.raises(ValueError, match="twice"):
        kv.scatter(blocks(1, 1), range(3), torch.zeros(kv.frame_bytes(2, 3), dtype=torch.uint8))


def test_copy_block_refuses_a_block_out_of_range() -> None:
    kv = KvTensors(geometry_with(), 4)
    with pytest.raises(ValueError, match="got 4"):
        kv.copy_block(BlockId(0), BlockId(4))
