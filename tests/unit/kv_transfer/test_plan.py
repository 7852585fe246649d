from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.lanes import make_pair
from kv_transfer.plan import make_manifest
from pdserve.config.link_memory import max_frame_bytes
from pdserve.config.model import KvGeometry

GEOMETRY = KvGeometry(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype="bfloat16",
    model_revision="r",
)
SAME = make_pair(GEOMETRY, GEOMETRY)

shapes = st.builds(
    replace,
    st.just(GEOMETRY),
    tensor_parallel=st.sampled_from((1, 2, 4)),
    pipeline_parallel=st.sampled_from((1, 2, 3)),
    block_size=st.sampled_from((1, 16, 32)),
    dtype=st.sampled_from(("float32", "bfloat16")),
)


@given(
    num_tokens=st.integers(1, 3000),
    cached_blocks=st.integers(0, 200),
    blocks_per_frame=st.integers(1, 40),
)
def test_frames_cover_every_uncached_token_once_in_order(
    num_tokens: int, cached_blocks: int, blocks_per_frame: int
) -> None:
    cached = min(cached_blocks, num_tokens // 16) * 16
    manifest = make_manifest(SAME, num_tokens, cached, blocks_per_frame * 16)
    covered = [token for frame in manifest.frames for token in frame.tokens]
    assert covered == list(range(cached, num_tokens))
    assert [frame.index for frame in manifest.frames] == list(range(len(manifest.frames)))
    assert manifest.num_blocks == -(-num_tokens // 16) - cached // 16
    assert manifest.num_bytes == len(covered) * GEOMETRY.bytes_per_token
    limit = max_frame_bytes(GEOMETRY, 0, blocks_per_frame * 16, "auto")
    assert all(0 < frame.num_bytes <= limit for frame in manifest.frames)


@given(
    prefill=shapes,
    decode=shapes,
    num_tokens=st.integers(1, 150),
    cached_blocks=st.integers(0, 3),
    frame_tokens=st.sampled_from((32, 64)),
    frame_layers=st.sampled_from((None, 1, 2, 7)),
)
def test_A15_every_layer_head_and_token_reaches_every_decode_rank_once(
    prefill: KvGeometry,
    decode: KvGeometry,
    num_tokens: int,
    cached_blocks: int,
    frame_tokens: int,
    frame_layers: int | None,
) -> None:
    size = decode.block_size
    cached = min(cached_blocks, num_tokens // size) * size
    pair = make_pair(prefill, decode)
    manifest = make_manifest(pair, num_tokens, cached, frame_tokens, frame_layers)
    got: Counter[tuple[int, int, int, int]] = Counter()
    for frame in manifest.frames:
        holder = prefill.parts[frame.prefill_rank]
        for layer in frame.layers:
            assert layer in holder.layers
            for head in frame.heads:
                assert head in holder.kv_heads
                got.update((frame.decode_rank, layer, head, token) for token in frame.tokens)
        limit = max_frame_bytes(decode, frame.decode_rank, frame_tokens, "auto", frame_layers)
        assert len(frame.layers) <= (frame_layers or decode.num_layers)
        assert 0 < frame.num_bytes <= limit
    wanted = {
        (part.rank, layer, head, token)
        for part in decode.parts
        for layer in part.layers
        for head in part.kv_heads
        for token in range(cached, num_tokens)
    }
    assert set(got) == wanted
    assert all(count == 1 for count in got.values())


def test_frame_borders_are_absolute_whatever_is_cached() -> None:
    ends = [frame.end_token for frame in make_manifest(SAME, 300, 48, 128).frames]
    assert ends == [128, 256, 300]


def test_a_fully_cached_prompt_has_no_frames() -> None:
    assert make_manifest(SAME, 64, 64, 64).frames == ()


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, 0), (127, 0), (128, 1), (255, 1), (299, 2), (300, 3)]
)
def test_a_frame_is_ready_once_its_last_token_is_computed(num_computed: int, expected: int) -> None:
    assert make_manifest(SAME, 300, 0, 128).count_ready(num_computed) == expected


def test_the_frames_of_all_lanes_are_ready_together() -> None:
    wide = replace(GEOMETRY, tensor_parallel=2)
    manifest = make_manifest(make_pair(wide, GEOMETRY), 300, 0, 128)
    assert [manifest.count_ready(n) for n in (127, 128, 300)] == [0, 2, 6]


def test_frames_of_a_stretch_come_in_the_order_in_which_layers_are_computed() -> None:
    staged = make_pair(replace(GEOMETRY, pipeline_parallel=2), GEOMETRY)
    frames = make_manifest(staged, 150, 0, 128, 1).frames
    assert [(frame.end_token, frame.first_layer) for frame in frames] == [
        (end, layer) for end in (128, 150) for layer in (0, 1, 2)
    ]


def test_the_digest_covers_how_layers_are_cut() -> None:
    digests = {make_manifest(SAME, 9, 0, 16, cut).digest for cut in (None, 1, 2)}
    assert len(digests) == 3


def test_frames_of_no_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="frame_layers must be positive, got 0"):
        make_manifest(SAME, 9, 0, 16, 0)


def test_both_ends_derive_the_same_digest() -> None:
    other = make_pair(replace(GEOMETRY), replace(GEOMETRY))
    assert make_manifest(SAME, 300, 16, 128).digest == make_manifest(other, 300, 16, 128).digest


@pytest.mark.parametrize("change", [(301, 16, 128), (300, 32, 128), (300, 16, 64)])
def test_the_digest_differs_when_any_input_differs(change: tuple[int, int, int]) -> None:
    assert make_manifest(SAME, *change).digest != make_manifest(SAME, 300, 16, 128).digest


@pytest.mark.parametrize(
    "change",
    [
        {"model_revision": "s"},
        {"block_size": 8},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"dtype": "float32"},
    ],
)
def test_the_digest_covers_both_geometries(change: dict[str, object]) -> None:
    other = replace(GEOMETRY, **change)  # type: ignore[arg-type]
    theirs = make_manifest(make_pair(other, other), 16, 0, 16)
    assert theirs.digest != make_manifest(SAME, 16, 0, 16).digest


def test_the_digest_covers_the_wire_dtype() -> None:
    wide = make_pair(GEOMETRY, GEOMETRY, "float32")
    assert make_manifest(wide, 9, 0, 16).digest != make_manifest(SAME, 9, 0, 16).digest


@pytest.mark.parametrize(
    ("num_tokens", "cached", "frame_tokens"), [(9, 8, 16), (9, 0, 24), (9, 16, 16), (9, 0, 0)]
)
def test_odd_borders_are_refused(num_tokens: int, cached: int, frame_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_manifest(SAME, num_tokens, cached, frame_tokens)
