from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from kv_transfer.lanes import check_compatible, make_lanes, make_pair
from pdserve.config.model import KvGeometry
from pdserve.errors import ConfigError

GEOMETRY = KvGeometry(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype="bfloat16",
    model_revision="r",
)
SIZES = (1, 2, 3, 4, 6, 8)
STAGES = (1, 2, 3, 4)


def geometries(num_layers: int, num_kv_heads: int) -> list[KvGeometry]:
    """Every shape of a model that the rule allows."""
    base = replace(GEOMETRY, num_layers=num_layers, num_kv_heads=num_kv_heads)
    return [
        replace(base, tensor_parallel=tensor, pipeline_parallel=stages)
        for tensor, stages in product(SIZES, STAGES)
        if (num_kv_heads % tensor == 0 or tensor % num_kv_heads == 0) and stages <= num_layers
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("num_layers", [1, 4, 7])
def test_A15_lanes_fill_every_layer_and_head_of_every_decode_rank_once(
    num_kv_heads: int, num_layers: int
) -> None:
    shapes = geometries(num_layers, num_kv_heads)
    for prefill, decode in product(shapes, shapes):
        got: Counter[tuple[int, int, int]] = Counter()
        for lane in make_lanes(make_pair(prefill, decode)):
            sender = prefill.parts[lane.prefill_rank]
            assert set(lane.layers) <= set(sender.layers)
            assert set(lane.heads) <= set(sender.kv_heads)
            assert len(lane.layers) * len(lane.heads) > 0
            got.update((lane.decode_rank, *item) for item in product(lane.layers, lane.heads))
        wanted = {
            (part.rank, *item)
            for part in decode.parts
            for item in product(part.layers, part.kv_heads)
        }
        assert set(got) == wanted
        assert set(got.values()) == {1}


def test_prefill_ranks_that_hold_the_same_head_share_the_receivers() -> None:
    prefill = replace(GEOMETRY, tensor_parallel=4, num_kv_heads=2)
    decode = replace(prefill, tensor_parallel=4)
    served = Counter(lane.prefill_rank for lane in make_lanes(make_pair(prefill, decode)))
    assert served == {0: 1, 1: 1, 2: 1, 3: 1}


def test_equal_single_ranks_have_one_lane_with_everything() -> None:
    (lane,) = make_lanes(make_pair(GEOMETRY, GEOMETRY))
    assert (lane.prefill_rank, lane.decode_rank) == (0, 0)
    assert (lane.layers, lane.heads) == (range(3), range(2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 4),
        ("num_kv_heads", 1),
        ("head_dim", 16),
        ("model_revision", "other"),
        ("layout", "LBKSHD"),
        ("wire_version", 1),
    ],
)
def test_A17_a_mismatch_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    other = replace(GEOMETRY, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{field} differs"):
        check_compatible(GEOMETRY, other)
    assert other.digest() != GEOMETRY.digest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 32),
        ("dtype", "float32"),
        ("tensor_parallel", 2),
        ("pipeline_parallel", 3),
    ],
)
def test_A15_what_may_differ_is_compatible_and_has_one_digest(field: str, value: object) -> None:
    other = replace(GEOMETRY, **{field: value})  # type: ignore[arg-type]
    check_compatible(GEOMETRY, other)
    check_compatible(other, GEOMETRY)
    assert other.digest() == GEOMETRY.digest()
    assert GEOMETRY.in_shape(other.shape) == other


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel", 3),
        ("tensor_parallel", 0),
        ("pipeline_parallel", 4),
        ("dtype", "float16"),
        ("block_size", 0),
    ],
)
def test_A15_a_shape_that_is_not_supported_is_refused_by_name(field: str, value: object) -> None:
    odd = replace(GEOMETRY, **{field: value})  # type: ignore[arg-type]
    for prefill, decode in ((odd, GEOMETRY), (GEOMETRY, odd)):
        with pytest.raises(ConfigError, match=f"^{field} must be|^{field} must divide"):
            check_compatible(prefill, decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "wish", "expected"),
    [
        ("float32", "float32", "auto", "float32"),
        ("float32", "bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "auto", "bfloat16"),
        ("float32", "float32", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32", "float32"),
    ],
)
def test_frames_have_the_narrower_dtype_unless_told(
    prefill: str, decode: str, wish: str, expected: str
) -> None:
    pair = make_pair(replace(GEOMETRY, dtype=prefill), replace(GEOMETRY, dtype=decode), wish)
    assert pair.wire_dtype == expected


def test_an_unknown_wire_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire_dtype must be one of"):
        make_pair(GEOMETRY, GEOMETRY, "int8")
