from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdserve.cache.kv_region import KvRegion, make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.request import BlockId
from tests.support.kv import fill, whole_blocks

GEOMETRY = KvGeometry(
    num_layers=3,
    num_kv_heads=2,
    head_dim=4,
    block_size=16,
    dtype="float32",
    model_revision="r",
)


def geometry_with(**over: object) -> KvGeometry:
    return replace(GEOMETRY, **over)  # type: ignore[arg-type]  # overrides of test fields


def filled(geometry: KvGeometry, num_blocks: int, seed: int = 0) -> KvTensors:
    return fill(KvTensors(geometry, num_blocks), seed)


def token_values(kv: KvTensors, table: tuple[int, ...], tokens: range) -> Tensor:
    """Looks tokens up one by one: [layer, K or V, token, head, dim]."""
    size = kv.geometry.block_size
    slots = [table[token // size] * size + token % size for token in tokens]
    layers = range(len(kv.part.layers))
    return torch.stack([torch.stack([half[slots] for half in kv.layer(layer)]) for layer in layers])


def region_of(kv: KvTensors, table: tuple[int, ...], tokens: range, **over: object) -> KvRegion:
    region = make_region(
        table=tuple(BlockId(block) for block in table),
        block_size=kv.geometry.block_size,
        tokens=tokens,
        layers=kv.part.layers,
        heads=kv.part.kv_heads,
        dtype=kv.geometry.dtype,
    )
    return replace(region, **over)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_frame_scatters_to_the_same_values_elsewhere(dtype: str) -> None:
    geometry = geometry_with(dtype=dtype)
    source, target = filled(geometry, 8), KvTensors(geometry, 10)
    frame = source.pack(whole_blocks(source, (2, 7, 3)))
    target.scatter(whole_blocks(target, (9, 0, 4)), frame)
    sent = token_values(source, (2, 7, 3), range(48))
    assert torch.equal(token_values(target, (9, 0, 4), range(48)), sent)


def test_a_scatter_leaves_other_blocks_layers_and_heads_alone() -> None:
    geometry = geometry_with()
    source, target = filled(geometry, 4), filled(geometry, 4, seed=1)
    before = token_values(target, (0, 1, 2, 3), range(64))
    where = whole_blocks(target, (1,), range(1, 3), range(1, 2))
    target.scatter(where, source.pack(whole_blocks(source, (0,), range(1, 3), range(1, 2))))
    after = token_values(target, (0, 1, 2, 3), range(64))
    expected = before.clone()
    expected[1:3, :, 16:32, 1:2] = token_values(source, (0,), range(16))[1:3, :, :, 1:2]
    assert torch.equal(after, expected)


def test_a_frame_lies_in_the_order_layer_kv_token_head_dim() -> None:
    geometry = geometry_with(num_layers=2, num_kv_heads=1, head_dim=2, block_size=1)
    kv = KvTensors(geometry, 2)
    for layer in range(2):
        for place, part in enumerate(kv.layer(layer)):
            for block in range(2):
                base = 100 * layer + 10 * place + block
                part[block, 0] = torch.tensor([base, base + 0.5])
    frame = kv.pack(whole_blocks(kv, (1, 0))).view(torch.float32).tolist()
    bases = [1, 0, 11, 10, 101, 100, 111, 110]
    assert frame == [value for base in bases for value in (base, base + 0.5)]


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 32), (32, 16), (1, 16), (16, 16)])
@pytest.mark.parametrize("tokens", [range(64), range(32, 61), range(0, 5), range(33, 34)])
def test_A15_blocks_of_any_size_turn_into_blocks_of_any_other(
    source_size: int, target_size: int, tokens: range
) -> None:
    source = filled(geometry_with(block_size=source_size), 128 // source_size)
    target = filled(geometry_with(block_size=target_size), 128 // target_size, seed=1)
    sent_table = tuple(reversed(range(128 // source_size)))
    landed_table = tuple((3 * block + 1) % (128 // target_size) for block in range(64))
    landed_table = tuple(dict.fromkeys(landed_table))
    before = token_values(target, landed_table, range(64))
    frame = source.pack(region_of(source, sent_table, tokens))
    target.scatter(region_of(target, landed_table, tokens), frame)
    expected = before.clone()
    expected[:, :, tokens.start : tokens.stop] = token_values(source, sent_table, tokens)
    assert torch.equal(token_values(target, landed_table, range(64)), expected)
    assert frame.numel() == len(tokens) * source.geometry.bytes_per_token


def test_the_bytes_of_a_frame_do_not_tell_the_block_size() -> None:
    small, large = filled(geometry_with(block_size=8), 8), KvTensors(geometry_with(), 4)
    tokens = range(3, 50)
    frame = small.pack(region_of(small, tuple(range(8)), tokens))
    large.scatter(region_of(large, (3, 1, 0, 2), tokens), frame)
    assert torch.equal(large.pack(region_of(large, (3, 1, 0, 2), tokens)), frame)


@pytest.mark.parametrize(
    ("source_dtype", "target_dtype", "wire_dtype"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
    ],
)
def test_A15_values_are_rounded_once_to_the_narrowest_dtype(
    source_dtype: str, target_dtype: str, wire_dtype: str
) -> None:
    source = filled(geometry_with(dtype=source_dtype), 4)
    target = KvTensors(geometry_with(dtype=target_dtype), 4)
    frame = source.pack(whole_blocks(source, (2, 0), dtype=wire_dtype))
    target.scatter(whole_blocks(target, (1, 3), dtype=wire_dtype), frame)
    landed = token_values(target, (1, 3), range(32))
    expected = token_values(source, (2, 0), range(32)).to(torch.bfloat16).to(landed.dtype)
    assert torch.equal(landed, expected)
    assert frame.numel() == source.frame_bytes(whole_blocks(source, (2, 0), dtype=wire_dtype))


def test_A15_a_rank_keeps_only_its_layers_and_heads_and_is_asked_in_those_of_the_model() -> None:
    wide = geometry_with(num_kv_heads=4, tensor_parallel=2, pipeline_parallel=2)
    whole = filled(replace(wide, tensor_parallel=1, pipeline_parallel=1), 4)
    part = KvTensors(wide, 4, wide.parts[3])
    assert len(part.layer(0)[0][0]) == 2
    assert (part.part.layers, part.part.kv_heads) == (range(2, 3), range(2, 4))
    region = whole_blocks(part, (1, 2))
    part.scatter(region, whole.pack(region))
    expected = token_values(whole, (1, 2), range(32))[2:3, :, :, 2:4]
    assert torch.equal(token_values(part, (1, 2), range(32)), expected)


def test_a_frame_has_the_size_that_the_geometry_says() -> None:
    geometry = geometry_with(dtype="bfloat16")
    kv = KvTensors(geometry, 4)
    frame = kv.pack(whole_blocks(kv, (0, 1)))
    assert frame.numel() == 2 * geometry.bytes_per_block
    assert frame.dtype == torch.uint8


def test_a_frame_may_start_at_an_odd_address() -> None:
    geometry = geometry_with()
    source, target = filled(geometry, 2), KvTensors(geometry, 2)
    frame = source.pack(whole_blocks(source, (0,)))
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), frame))[1:]
    target.scatter(whole_blocks(target, (1,)), shifted)
    assert torch.equal(target.pack(whole_blocks(target, (1,))), frame)


def test_a_frame_is_a_copy() -> None:
    kv = filled(geometry_with(), 2)
    frame = kv.pack(whole_blocks(kv, (0,)))
    before = frame.clone()
    kv.copy_block(BlockId(1), BlockId(0))
    assert torch.equal(frame, before)


def test_copy_block_copies_all_layers() -> None:
    kv = filled(geometry_with(), 3)
    kv.copy_block(BlockId(2), BlockId(0))
    assert torch.equal(kv.pack(whole_blocks(kv, (0,))), kv.pack(whole_blocks(kv, (2,))))


def test_new_memory_is_zero() -> None:
    kv = KvTensors(geometry_with(block_size=8), 2)
    keys, values = kv.layer(1)
    assert keys.shape == values.shape == (2 * 8, 2, 4)
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": ()}, "no block"),
        ({"block_ids": (4,)}, r"block id must be in \[0, 4\), got 4"),
        ({"block_ids": (-1,)}, "got -1"),
        ({"layers": range(2, 2)}, "layers must lie"),
        ({"layers": range(1, 4)}, "layers must lie"),
        ({"layers": range(0, 3, 2)}, "layers must lie"),
        ({"layers": range(-1, 1)}, "layers must lie"),
        ({"heads": range(1, 3)}, r"heads must lie in \[0, 2\)"),
        ({"num_tokens": 17}, "17 tokens from slot 0 on do not lie in 1 blocks of 16"),
        ({"num_tokens": 0}, "0 tokens"),
        ({"offset": 16, "num_tokens": 1}, "slot 16"),
        ({"offset": -1}, "slot -1"),
        ({"block_ids": (0, 1)}, "do not lie in 2 blocks"),
    ],
)
def test_pack_refuses_what_reaches_beyond_the_memory(
    change: dict[str, object], message: str
) -> None:
    kv = KvTensors(geometry_with(), 4)
    region = replace(whole_blocks(kv, (0,)), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        kv.pack(region)


@pytest.mark.parametrize("extra", [-1, 1, -4])
def test_A9_scatter_refuses_a_frame_of_another_size_and_writes_nothing(extra: int) -> None:
    kv = filled(geometry_with(), 4)
    everything = whole_blocks(kv, (0, 1, 2, 3))
    before = kv.pack(everything)
    region = whole_blocks(kv, (1,))
    payload = torch.zeros(kv.frame_bytes(region) + extra, dtype=torch.uint8)
    with pytest.raises(ValueError, match="payload must be"):
        kv.scatter(region, payload)
    assert torch.equal(kv.pack(everything), before)


def test_scatter_refuses_other_types_and_double_blocks() -> None:
    kv = KvTensors(geometry_with(), 4)
    region = whole_blocks(kv, (1,))
    with pytest.raises(ValueError, match="1-D uint8"):
        kv.scatter(region, torch.zeros(kv.frame_bytes(region) // 4))
    twice = whole_blocks(kv, (1, 1))
    with pytest.raises(ValueError, match="twice"):
        kv.scatter(twice, torch.zeros(kv.frame_bytes(twice), dtype=torch.uint8))


def test_copy_block_refuses_a_block_out_of_range() -> None:
    kv = KvTensors(geometry_with(), 4)
    with pytest.raises(ValueError, match="got 4"):
        kv.copy_block(BlockId(0), BlockId(4))
