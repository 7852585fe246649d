import pytest
import torch

from pdserve.cache.kv_frame import decode_values, encode_values
from pdserve.config.shape import count_frame_bytes

SHAPE = (2, 2, 5, 3, 16)


def values_of(scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_frames_hold_the_values_as_they_are(dtype: str) -> None:
    values = values_of().bfloat16()
    frame = encode_values(values, dtype)
    assert frame.numel() == count_frame_bytes(60, 16, dtype)
    assert torch.equal(decode_values(frame, SHAPE, dtype).bfloat16(), values)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_fp8_costs_three_percent_of_the_norm_at_any_scale(scale: float) -> None:
    values = values_of(scale)
    frame = encode_values(values, "fp8")
    assert frame.numel() == count_frame_bytes(60, 16, "fp8") == 60 * 16 + 60 * 4
    back = decode_values(frame, SHAPE, "fp8")
    error = (back - values).norm() / values.norm()
    assert 0.01 < error < 0.035
    # Of one value: half a step of e4m3 where it is normal, and of its head's largest below.
    limit = (values.abs() / 16).maximum(values.abs().amax(-1, keepdim=True) / 448 / 512)
    assert bool(((back - values).abs() <= limit * 1.001).all())


def test_fp8_keeps_zeros_signs_and_each_head_s_own_scale() -> None:
    values = torch.zeros(1, 1, 1, 3, 4)
    values[..., 1, :] = torch.tensor([448.0, -448.0, 0.0, 1.0])
    values[..., 2, :] = torch.tensor([1e-30, -1e-30, 0.0, 0.0])
    back = decode_values(encode_values(values, "fp8"), (1, 1, 1, 3, 4), "fp8")
    torch.testing.assert_close(back, values, rtol=1e-6, atol=0.0)


def test_fp8_never_turns_the_largest_value_into_nan() -> None:
    for seed in range(20):
        values = values_of(3.0, seed)
        assert bool(torch.isfinite(decode_values(encode_values(values, "fp8"), SHAPE, "fp8")).all())


@pytest.mark.parametrize("value", [1e-40, 1e-44])
def test_fp8_of_values_next_to_nothing_stays_next_to_nothing(value: float) -> None:
    values = torch.tensor([[value, -value, 0.0, value]])
    back = decode_values(encode_values(values, "fp8"), (1, 4), "fp8")
    assert bool((back - values).abs().max() <= 2e-42)


def test_scales_lie_on_whole_words_for_odd_heads() -> None:
    values = torch.randn(1, 2, 1, 1, 3, generator=torch.Generator().manual_seed(1))
    frame = encode_values(values, "fp8")
    assert frame.numel() == count_frame_bytes(2, 3, "fp8") == 8 + 8
    back = decode_values(frame, (1, 2, 1, 1, 3), "fp8")
    torch.testing.assert_close(back, values, rtol=0.07, atol=0.01)


def test_a_frame_of_any_alignment_is_read() -> None:
    values = values_of()
    for dtype in ("float32", "fp8"):
        frame = encode_values(values, dtype)
        shifted = torch.empty(frame.numel() + 1, dtype=torch.uint8)[1:]
        shifted.copy_(frame)
        expected = decode_values(frame, SHAPE, dtype)
        assert torch.equal(decode_values(shifted, SHAPE, dtype), expected)
