from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kv_transfer.events import FrameLanded, LinkId
from kv_transfer.prefill_actions import PrefillStage
from pdserve.config.model import KvGeometry
from pdserve.errors import ConfigError
from tests.unit.kv_transfer.sharded_pair import D, P, ShardedPair

NUM_TOKENS, NUM_LAYERS, HEAD_DIM = 75, 3, 4
MODEL = KvGeometry(
    num_layers=NUM_LAYERS,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    block_size=16,
    dtype="float32",
    model_revision="r",
)


def shapes_of(num_kv_heads: int) -> list[KvGeometry]:
    found = []
    for tensor, stages in product((1, 2, 3, 4), (1, 2)):
        geometry = replace(
            MODEL, num_kv_heads=num_kv_heads, tensor_parallel=tensor, pipeline_parallel=stages
        )
        try:
            _ = geometry.parts
        except ConfigError:
            continue
        found.append(geometry)
    return found


def values_of(num_kv_heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM_LAYERS, 2, NUM_TOKENS, num_kv_heads, HEAD_DIM, generator=generator)


def assert_landed(pair: ShardedPair, values: Tensor, first_token: int = 0) -> None:
    assert pair.handoff.stage is PrefillStage.HANDED_OFF
    assert pair.started is not None
    for part in pair.decode.geometry.parts:
        heads, layers = part.kv_heads, part.layers
        expected = values[layers.start : layers.stop, ..., heads.start : heads.stop, :].clone()
        landed = pair.decode.read(part.rank)
        expected[:, :, :first_token] = 0
        assert torch.equal(landed, expected.to(landed.dtype))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
def test_A15_kv_of_every_shape_lands_in_every_shape(num_kv_heads: int) -> None:
    values = values_of(num_kv_heads)
    shapes = shapes_of(num_kv_heads)
    assert len(shapes) == (4 if num_kv_heads == 3 else 8 if num_kv_heads == 1 else 6)
    for prefill, decode in product(shapes, shapes):
        pair = ShardedPair(prefill, decode, NUM_TOKENS)
        pair.prefill.write(values)
        pair.run()
        assert_landed(pair, values)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), (32, 16), (8, 1), (128, 16)])
def test_A15_block_sizes_may_differ_as_well(prefill_size: int, decode_size: int) -> None:
    values = values_of(4)
    for prefill, decode in product(shapes_of(4)[2:], repeat=2):
        pair = ShardedPair(
            replace(prefill, block_size=prefill_size),
            replace(decode, block_size=decode_size),
            NUM_TOKENS,
            num_cached_tokens=32,
        )
        pair.prefill.write(values)
        pair.run()
        assert_landed(pair, values, first_token=32)


@pytest.mark.parametrize(
    ("prefill_dtype", "decode_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_A15_dtypes_may_differ_and_values_are_rounded_once(
    prefill_dtype: str, decode_dtype: str
) -> None:
    values = values_of(2)
    prefill = replace(MODEL, dtype=prefill_dtype, tensor_parallel=2)
    pair = ShardedPair(prefill, replace(MODEL, dtype=decode_dtype), NUM_TOKENS)
    pair.prefill.write(values)
    pair.run()
    assert_landed(pair, values.to(torch.bfloat16))


@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_A15_an_unsupported_shape_is_refused_by_the_name_of_its_field(field: str) -> None:
    pair = ShardedPair(MODEL, MODEL, NUM_TOKENS)
    odd = replace(MODEL.shape, **{field: 5})  # type: ignore[arg-type]
    pair.handoff._me = replace(pair.handoff._me, shape=odd)
    pair.run()
    (detail,) = pair.refused
    assert f"incompatible: {field} must" in detail
    assert not pair.needs_placement


def make_wide_pair() -> ShardedPair:
    wide = replace(MODEL, tensor_parallel=2, pipeline_parallel=2)
    pair = ShardedPair(wide, wide, NUM_TOKENS)
    pair.prefill.write(values_of(2))
    return pair


@pytest.mark.parametrize("lane", [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_A15_a_sequence_starts_only_when_every_pair_of_ranks_is_done(lane: tuple[int, int]) -> None:
    pair = make_wide_pair()
    pair.held = {lane}
    pair.run()
    assert pair.started is None
    assert pair.handoff.stage is PrefillStage.COMMITTED
    pair.held = set()
    pair.pump()
    assert_landed(pair, values_of(2))


def test_the_death_of_one_link_with_frames_to_come_drops_the_hand_off() -> None:
    pair = make_wide_pair()
    pair.held = {(3, 3)}
    pair.run()
    pair.held = {(3, 3), (2, 2)}
    pair._decode(pair.handoffs.link_down(LinkId(P, 1, 3, 3)))
    assert pair.reserver.released == [b"reservation"]
    assert len(pair.needs_placement) == 1
    assert pair.started is None


def test_the_death_of_a_link_that_is_done_changes_nothing() -> None:
    pair = make_wide_pair()
    pair.held = {(3, 3)}
    pair.run()
    pair.senders[1].break_link(D, 1)
    pair.held = set()
    pair.pump()
    assert_landed(pair, values_of(2))


def test_a_frame_over_the_link_of_other_ranks_is_rejected() -> None:
    pair = make_wide_pair()
    pair.held = {(3, 3)}
    pair.run()
    frame = pair.frames[0].frame
    landed = FrameLanded(
        link=LinkId(P, 1, 2, 3),
        reservation_id=pair.frames[0].reservation_id,
        frame_index=frame.index,
        num_bytes=frame.num_bytes,
        slot=0,
        is_intact=True,
    )
    rejected, *_ = pair.handoffs.frame_landed(landed)
    assert "came over the link of ranks 2 and 3" in rejected.detail
