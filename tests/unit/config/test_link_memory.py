from dataclasses import replace

import pytest

from pdserve.config.link_memory import (
    FrameSize,
    choose_frame_tokens,
    link_memory_bytes,
    link_slot_bytes,
    settle_frames,
)
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

MIB = 1 << 20
LLAMA_8B = KvGeometry(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype="bfloat16",
    model_revision="r",
)
SMOLLM2 = replace(LLAMA_8B, num_layers=30, num_kv_heads=3, head_dim=64)


@pytest.mark.parametrize(
    ("geometry", "is_on_gpu", "expected"),
    [
        (LLAMA_8B, True, 512),
        (LLAMA_8B, False, 32),
        (SMOLLM2, False, 256),
        (replace(SMOLLM2, dtype="float32"), False, 128),
        (SMOLLM2, True, 512),
        (replace(LLAMA_8B, num_layers=80), True, 128),
        (replace(LLAMA_8B, num_layers=80, tensor_parallel=4), True, 512),
        (replace(LLAMA_8B, num_layers=2000, block_size=128), False, 128),
    ],
)
def test_frames_fit_what_carries_them(geometry: KvGeometry, is_on_gpu: bool, expected: int) -> None:
    assert choose_frame_tokens(geometry, is_on_gpu=is_on_gpu) == expected


@pytest.mark.parametrize(
    ("geometry", "num_tokens", "expected"),
    [
        (LLAMA_8B, 1023, FrameSize(512)),
        (LLAMA_8B, 1024, FrameSize(2048, 8)),
        (replace(LLAMA_8B, tensor_parallel=4), 4096, FrameSize(2048, 8)),
        (replace(LLAMA_8B, num_layers=80), 4096, FrameSize(2048, 8)),
        (replace(LLAMA_8B, num_layers=8), 4096, FrameSize(512)),
        (replace(LLAMA_8B, num_layers=16, pipeline_parallel=2), 4096, FrameSize(512)),
        (replace(LLAMA_8B, num_kv_heads=32), 4096, FrameSize(512, 8)),
    ],
)
def test_long_prompts_are_cut_into_groups_of_layers_on_a_gpu(
    geometry: KvGeometry, num_tokens: int, expected: FrameSize
) -> None:
    assert settle_frames(HandoffConfig(), geometry, is_on_gpu=True).choose(num_tokens) == expected


def test_on_a_cpu_groups_of_layers_must_be_asked_for() -> None:
    plain = settle_frames(HandoffConfig(), SMOLLM2, is_on_gpu=False)
    assert plain.choose(10_000) == plain.whole == FrameSize(256)
    handoff = HandoffConfig(frame_layers=10, layered_from_tokens=300)
    asked = settle_frames(handoff, SMOLLM2, is_on_gpu=False)
    assert asked.choose(299) == FrameSize(256)
    assert asked.choose(300) == FrameSize(512, 10)


def test_settings_have_the_last_word() -> None:
    handoff = HandoffConfig(frame_tokens=48)
    assert settle_frames(handoff, LLAMA_8B, is_on_gpu=True).whole.tokens == 48


def test_slots_hold_the_largest_frame_aligned() -> None:
    assert link_slot_bytes(HandoffConfig(), LLAMA_8B, 0, is_on_gpu=True) == 64 * MIB
    fp8 = HandoffConfig(wire_dtype="fp8")
    assert link_slot_bytes(fp8, LLAMA_8B, 0, is_on_gpu=True) == 33 * MIB
    layered = HandoffConfig(frame_tokens=512, frame_layers=8)
    assert link_slot_bytes(layered, LLAMA_8B, 0, is_on_gpu=True) == 64 * MIB
    odd = replace(LLAMA_8B, num_layers=1, num_kv_heads=1, head_dim=9)
    assert link_slot_bytes(HandoffConfig(frame_tokens=16), odd, 0, is_on_gpu=True) % 256 == 0


def test_the_reserve_counts_what_the_settings_allow() -> None:
    ring = 4 * 64 * MIB
    push = HandoffConfig(transports=("push", "gloo"), max_device_links=3)
    assert link_memory_bytes(push, LLAMA_8B, 0, Role.DECODE) == 3 * ring
    assert link_memory_bytes(push, LLAMA_8B, 0, Role.PREFILL) == 0
    gloo = HandoffConfig(transports=("gloo",))
    assert link_memory_bytes(gloo, LLAMA_8B, 0, Role.DECODE) == 0
    nccl = HandoffConfig(transports=("nccl",), max_device_links=1)
    staged = 2 * 64 * MIB
    decode, prefill = (
        link_memory_bytes(nccl, LLAMA_8B, 0, role) for role in (Role.DECODE, Role.PREFILL)
    )
    assert decode - prefill == ring - staged
    assert prefill > staged


@pytest.mark.parametrize("transports", [(), ("push", "push"), ("tcp",)])
def test_transports_are_some_of_those_there_are(transports: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="transports must be some of push, nccl, gloo"):
        HandoffConfig(transports=transports)
