from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import check_compatible, frame_bytes, make_manifest
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


@given(
    num_tokens=st.integers(1, 3000),
    cached_blocks=st.integers(0, 200),
    blocks_per_frame=st.integers(1, 40),
)
def test_frames_cover_every_uncached_block_once_in_order(
    num_tokens: int, cached_blocks: int, blocks_per_frame: int
) -> None:
    cached = min(cached_blocks, num_tokens // 16) * 16
    manifest = make_manifest(GEOMETRY, num_tokens, cached, blocks_per_frame * 16)
    covered = [
        block
        for frame in manifest.frames
        for block in range(frame.first_block, frame.first_block + frame.num_blocks)
    ]
    assert covered == list(range(cached // 16, -(-num_tokens // 16)))
    assert [frame.index for frame in manifest.frames] == list(range(len(manifest.frames)))
    assert manifest.num_blocks == len(covered)
    assert manifest.num_bytes == len(covered) * GEOMETRY.bytes_per_block
    limit = frame_bytes(GEOMETRY, blocks_per_frame * 16)
    assert all(0 < frame.num_bytes <= limit for frame in manifest.frames)


def test_frame_borders_are_absolute_whatever_is_cached() -> None:
    ends = [frame.end_token for frame in make_manifest(GEOMETRY, 300, 48, 128).frames]
    assert ends == [128, 256, 300]


def test_a_fully_cached_prompt_has_no_frames() -> None:
    assert make_manifest(GEOMETRY, 64, 64, 64).frames == ()


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, 0), (127, 0), (128, 1), (255, 1), (299, 2), (300, 3)]
)
def test_a_frame_is_ready_once_its_last_token_is_computed(num_computed: int, expected: int) -> None:
    assert make_manifest(GEOMETRY, 300, 0, 128).count_ready(num_computed) == expected


def test_both_ends_derive_the_same_digest() -> None:
    one = make_manifest(GEOMETRY, 300, 16, 128)
    assert one.digest == make_manifest(replace(GEOMETRY), 300, 16, 128).digest


@pytest.mark.parametrize("change", [(301, 16, 128), (300, 32, 128), (300, 16, 64)])
def test_the_digest_differs_when_any_input_differs(change: tuple[int, int, int]) -> None:
    assert make_manifest(GEOMETRY, *change).digest != make_manifest(GEOMETRY, 300, 16, 128).digest


def test_the_digest_covers_the_geometry() -> None:
    other = replace(GEOMETRY, model_revision="s")
    assert make_manifest(other, 9, 0, 16).digest != make_manifest(GEOMETRY, 9, 0, 16).digest


@pytest.mark.parametrize(
    ("num_tokens", "cached", "frame_tokens"), [(9, 8, 16), (9, 0, 24), (9, 16, 16), (9, 0, 0)]
)
def test_odd_borders_are_refused(num_tokens: int, cached: int, frame_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_manifest(GEOMETRY, num_tokens, cached, frame_tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 4),
        ("num_kv_heads", 1),
        ("head_dim", 16),
        ("block_size", 32),
        ("dtype", "float32"),
        ("model_revision", "other"),
        ("tensor_parallel", 2),
        ("pipeline_parallel", 2),
        ("layout", "LBKSHD"),
        ("wire_version", 2),
    ],
)
def test_A17_a_mismatch_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    other = replace(GEOMETRY, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=field):
        check_compatible(GEOMETRY, other)


@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_equal_but_unsupported_shapes_are_refused_by_name(field: str) -> None:
    wide = replace(GEOMETRY, **{field: 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=field):
        check_compatible(wide, wide)


def test_equal_geometries_are_compatible() -> None:
    check_compatible(GEOMETRY, replace(GEOMETRY))
