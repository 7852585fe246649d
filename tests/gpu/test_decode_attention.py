"""Streamed decode attention against float64: Hopper alone has it."""

import pytest
import torch

from benchmarks.kernels.attention_checks import (
    LLAMA,
    RAGGED,
    Heads,
    check_behind_rotation,
    check_decode,
    count_changed_by_repetition,
)
from pdserve.kernels.streamed_attention import StreamTuning

ROUNDING = 4e-3
"""Of bfloat16 operands, relative."""


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper device")


@pytest.fixture(params=[1, 2])
def tuning(request: pytest.FixtureRequest) -> StreamTuning:
    return StreamTuning(programs_per_sm=request.param)


@pytest.mark.parametrize(
    "lengths",
    [RAGGED, (5,), (700,), (32768,), (100, 2000) * 32, (100, 7, 0, 331) * 64],
)
def test_each_sequence_attends_to_all_of_its_kv(
    lengths: tuple[int, ...], tuning: StreamTuning
) -> None:
    assert check_decode(LLAMA, lengths, tuning=tuning) < ROUNDING


@pytest.mark.parametrize(
    ("heads", "queries", "window", "soft_cap", "block_size"),
    [
        (LLAMA, 4, 100, None, 16),
        (LLAMA, 1, 333, None, 32),
        (LLAMA, 1, None, None, 128),
        ((8, 8, 64), 1, None, 20.0, 16),
        ((8, 4, 64), 3, None, None, 64),
        ((16, 4, 256), 2, 333, None, 16),
    ],
)
def test_windows_caps_queries_and_sizes_of_heads_and_blocks(
    heads: Heads,
    queries: int,
    window: int | None,
    soft_cap: float | None,
    block_size: int,
    tuning: StreamTuning,
) -> None:
    error = check_decode(
        heads,
        (5, 700, 0, 2000),
        queries=queries,
        window=window,
        soft_cap=soft_cap,
        block_size=block_size,
        tuning=tuning,
    )
    assert error < ROUNDING


@pytest.mark.parametrize("length", [2, 90, 1500])
def test_several_queries_of_a_single_sequence_see_their_windows(
    length: int, tuning: StreamTuning
) -> None:
    error = check_decode(LLAMA, (length,), queries=2, window=77, tuning=tuning)
    assert error < ROUNDING


def test_what_the_kernel_ahead_stores_is_not_read_too_early(tuning: StreamTuning) -> None:
    assert check_behind_rotation(RAGGED, tuning=tuning) < ROUNDING


def test_a_chain_of_launches_gives_the_same_bits_each_time(tuning: StreamTuning) -> None:
    assert count_changed_by_repetition(RAGGED * 5, tuning=tuning, num_replays=40) == 0
