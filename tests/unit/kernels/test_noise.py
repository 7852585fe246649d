import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pdserve.kernels.noise import (
    SCORE_MARGIN,
    log2_exponential,
    log_exponential,
    noise_bits,
    noise_key,
    race,
)
from pdserve.sampler import exponential_noise

NUM_TOKENS = 4096


@triton.jit
def noise_kernel(row_ptr, exact_ptr, quick_ptr, first: tl.constexpr, block: tl.constexpr):
    key = noise_key(tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2))
    token_ids = first + tl.arange(0, block)
    bits = noise_bits(key, token_ids)
    tl.store(exact_ptr + tl.arange(0, block), log_exponential(bits))
    tl.store(quick_ptr + tl.arange(0, block), log2_exponential(bits))


@triton.jit
def bits_kernel(bits_ptr, exact_ptr, quick_ptr, block: tl.constexpr):
    at = tl.arange(0, block)
    bits = tl.load(bits_ptr + at).to(tl.uint64, bitcast=True)
    tl.store(exact_ptr + at, log_exponential(bits))
    tl.store(quick_ptr + at, log2_exponential(bits))


@triton.jit
def race_kernel(values_ptr, row_ptr, out_ptr, temperature_ptr, block: tl.constexpr):
    key = noise_key(tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2))
    token_ids = tl.arange(0, block)
    values = tl.load(values_ptr + token_ids)
    reference = tl.max(values, axis=0)
    winner, _ = race(values, token_ids, reference, tl.load(temperature_ptr), key)
    tl.store(out_ptr, winner)


def kernel_noise(
    seed: int, sample_index: int, output_index: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    signed = seed - 2**64 if seed >= 2**63 else seed
    row = torch.tensor([signed, sample_index, output_index])
    exact = torch.empty(NUM_TOKENS, dtype=torch.float64)
    quick = torch.empty(NUM_TOKENS, dtype=torch.float32)
    noise_kernel[(1,)](row, exact, quick, first=first, block=NUM_TOKENS)
    return exact, quick


@pytest.mark.parametrize(
    ("seed", "sample_index", "output_index", "first"),
    [
        (0, 0, 0, 0),
        (2**64 - 1, 3, 1000, 45_000),
        (2**63, 0, 2**31 - 1, 0),
        (123456789, 7, 1, 10**6),
    ],
)
def test_noise_is_that_of_the_cpu(
    seed: int, sample_index: int, output_index: int, first: int
) -> None:
    ids = np.arange(first, first + NUM_TOKENS, dtype=np.uint64)
    expected = exponential_noise(ids, seed, sample_index, output_index).log()
    exact, quick = kernel_noise(seed, sample_index, output_index, first)
    torch.testing.assert_close(exact, expected, atol=1e-14, rtol=1e-13)
    constant = np.log2(np.log(2))
    off = (quick.double() + constant - expected / np.log(2)).abs().max()
    assert float(off) < SCORE_MARGIN.value / 10


def test_quick_noise_is_right_at_the_ends_of_the_range() -> None:
    whole = [0, 1 << 12, 5 << 12, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 63) + (1 << 50)]
    whole += [(1 << 64) - 1, (1 << 64) - (3 << 12), (1 << 64) - (1 << 40), (1 << 64) - (1 << 57)]
    whole += [(1 << 64) - (1 << 58), (1 << 64) - (1 << 58) - 1, (1 << 63) + 1, 1 << 62, 3 << 61]
    bits = torch.from_numpy(np.array(whole, dtype=np.uint64).view(np.int64))
    exact = torch.empty(len(whole), dtype=torch.float64)
    quick = torch.empty(len(whole))
    bits_kernel[(1,)](bits, exact, quick, block=len(whole))
    off = (quick.double() + np.log2(np.log(2)) - exact / np.log(2)).abs().max()
    assert float(off) < SCORE_MARGIN.value / 10


@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 50.0])
def test_the_race_is_won_by_the_token_that_wins_in_float64(temperature: float) -> None:
    values = torch.randn(512, generator=torch.Generator().manual_seed(1)) * 3
    for output_index in range(40):
        noise = exponential_noise(np.arange(512, dtype=np.uint64), 5, 0, output_index)
        scores = (values.double() - values.max().double()) / temperature - noise.log()
        out = torch.empty(1, dtype=torch.int32)
        race_kernel[(1,)](
            values,
            torch.tensor([5, 0, output_index]),
            out,
            torch.tensor([temperature], dtype=torch.float64),
            block=512,
        )
        assert int(out) == int(scores.argmax())


def test_a_race_of_near_equals_is_decided_in_float64() -> None:
    # All quick scores are within the margin: each token is compared exactly.
    noise = exponential_noise(np.arange(16, dtype=np.uint64), 1, 0, 0)
    values = noise.log().float()
    scores = values.double() - noise.log()
    assert float(scores.max() - scores.min()) < 1e-6
    out = torch.empty(1, dtype=torch.int32)
    race_kernel[(1,)](
        values,
        torch.tensor([1, 0, 0]),
        out,
        torch.tensor([1.0], dtype=torch.float64),
        block=16,
    )
    assert int(out) == int(scores.argmax())
