from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from benchmarks.kernels.paged import (
    BLOCK_SIZE,
    PagedKv,
    attend_exactly,
    make_paged_kv,
    relative_error,
)
from pdserve.kernels.prefill_attention import make_scratch, prefill_attention
from pdserve.kernels.prefill_tuning import PrefillTuning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = 7.0
NUM_PADDING = 3
SMALL = PrefillTuning(tile_queries=16, tile_tokens=16, num_warps=4)
Chunk = tuple[int, int]
"""Tokens before it, tokens of it."""
CHUNKS: tuple[Chunk, ...] = ((0, 37), (5, 1), (48, 0), (31, 17))


def make_batch(
    chunks: tuple[Chunk, ...], heads: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, PagedKv]:
    torch.manual_seed(heads[2])
    lengths = [sum(chunk) for chunk in chunks]
    kv = make_paged_kv(lengths, heads[1], heads[2], is_poisoned=True, dtype=dtype, device=DEVICE)
    num_rows = sum(queries for _, queries in chunks) + NUM_PADDING
    return torch.randn(num_rows, heads[0], heads[2], dtype=dtype, device=DEVICE), kv


def attend(
    q: torch.Tensor,
    kv: PagedKv,
    chunks: tuple[Chunk, ...],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    max_query_tokens: int | None = None,
    num_splits: int = 1,
    tuning: PrefillTuning = SMALL,
) -> torch.Tensor:
    out = torch.full_like(q, UNTOUCHED)
    starts = [0, *accumulate(queries for _, queries in chunks)]
    contexts = [context for context, _ in chunks]
    prefill_attention(
        q,
        kv.keys,
        kv.values,
        kv.tables,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        out,
        max_query_tokens=max_query_tokens or max(queries for _, queries in chunks),
        block_size=BLOCK_SIZE,
        scale=q.shape[2] ** -0.5,
        window=window,
        soft_cap=soft_cap,
        num_splits=num_splits,
        scratch=make_scratch(*q.shape, num_splits, DEVICE),
        tuning=tuning,
    )
    return out


def expect(
    q: torch.Tensor,
    kv: PagedKv,
    chunks: tuple[Chunk, ...],
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    expected = torch.full(q.shape, UNTOUCHED, dtype=torch.float64, device=q.device)
    first = 0
    for row, (context, queries) in enumerate(chunks):
        if queries:
            rows = slice(first, first + queries)
            positions = range(context, context + queries)
            expected[rows] = attend_exactly(
                q[rows], kv, row, positions, window=window, soft_cap=soft_cap
            )
        first += queries
    return expected


@pytest.mark.parametrize(
    "heads", [(4, 2, 64), (2, 2, 80), (3, 1, 96), (4, 1, 128), (2, 1, 256), (7, 1, 16)]
)
def test_each_token_sees_itself_and_what_is_before(heads: tuple[int, int, int]) -> None:
    q, kv = make_batch(CHUNKS, heads)
    assert relative_error(attend(q, kv, CHUNKS), expect(q, kv, CHUNKS)) < 1e-6


def test_rows_of_padding_are_left_as_they_are() -> None:
    q, kv = make_batch(CHUNKS, (4, 2, 16))
    out = attend(q, kv, CHUNKS, max_query_tokens=64)
    assert bool((out[-NUM_PADDING:] == UNTOUCHED).all())


@pytest.mark.parametrize("window", [1, 16, 33, 1000])
def test_a_window_hides_what_is_older(window: int) -> None:
    q, kv = make_batch(CHUNKS, (4, 2, 16))
    out = attend(q, kv, CHUNKS, window=window)
    assert relative_error(out, expect(q, kv, CHUNKS, window)) < 1e-6


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_a_soft_cap_squeezes_scores(soft_cap: float) -> None:
    q, kv = make_batch(CHUNKS, (4, 2, 16))
    out = attend(q, kv, CHUNKS, soft_cap=soft_cap)
    assert relative_error(out, expect(q, kv, CHUNKS, soft_cap=soft_cap)) < 1e-6


def test_half_precision_is_as_near_as_its_rounding() -> None:
    q, kv = make_batch(CHUNKS, (4, 2, 64), torch.float16)
    assert relative_error(attend(q, kv, CHUNKS), expect(q, kv, CHUNKS)) < 1e-3


@pytest.mark.parametrize(("num_splits", "window"), [(2, 20), (3, None)])
def test_splits_of_the_kv_add_up(num_splits: int, window: int | None) -> None:
    q, kv = make_batch(CHUNKS, (5, 1, 16))
    out = attend(q, kv, CHUNKS, num_splits=num_splits, window=window)
    assert relative_error(out, expect(q, kv, CHUNKS, window)) < 1e-6


@pytest.mark.parametrize("window", [None, 20])
def test_where_a_prompt_is_cut_changes_no_bit(window: int | None) -> None:
    whole: tuple[Chunk, ...] = ((0, 59),)
    q, kv = make_batch(whole, (4, 2, 16))
    expected = attend(q, kv, whole, window=window)
    # The interpreter's matrix product rounds a row by its place in the tile; a device's does not.
    for cut in (16, 48) if DEVICE == "cpu" else (1, 16, 23, 48):
        first = attend(q[: cut + NUM_PADDING], kv, ((0, cut),), window=window)
        second = attend(q[cut:], kv, ((cut, 59 - cut),), window=window)
        assert torch.equal(first[:cut], expected[:cut])
        assert torch.equal(second[: 59 - cut], expected[cut:59])


def test_a_neighbour_in_the_batch_changes_no_bit() -> None:
    chunks: tuple[Chunk, ...] = ((20, 30), (3, 40))
    q, kv = make_batch(chunks, (4, 2, 16))
    together = attend(q, kv, chunks)
    second = replace(kv, tables=kv.tables[1:], lengths=kv.lengths[1:])
    alone = attend(q[30:], second, chunks[1:])
    assert torch.equal(alone[:40], together[30:70])


def test_the_default_tiles_agree_with_small_ones() -> None:
    chunks: tuple[Chunk, ...] = ((0, 150), (70, 5))
    q, kv = make_batch(chunks, (2, 1, 16))
    out = attend(q, kv, chunks, tuning=PrefillTuning())
    assert relative_error(out, expect(q, kv, chunks)) < 1e-6


def test_a_scale_of_zero_is_refused() -> None:
    q, kv = make_batch(((0, 4),), (2, 1, 16))
    with pytest.raises(AssertionError):
        prefill_attention(
            q,
            kv.keys,
            kv.values,
            kv.tables,
            torch.tensor([0, 4], dtype=torch.int32, device=DEVICE),
            torch.tensor([0], dtype=torch.int32, device=DEVICE),
            torch.empty_like(q),
            max_query_tokens=4,
            block_size=BLOCK_SIZE,
            scale=0.0,
        )
