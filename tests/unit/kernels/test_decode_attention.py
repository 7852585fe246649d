from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.paged import (
    BLOCK_SIZE,
    PagedKv,
    attend_exactly,
    make_paged_kv,
    relative_error,
)
from pdserve.kernels.decode_attention import DecodeTuning, decode_attention
from pdserve.kernels.decode_scratch import DecodeScratch, make_scratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = 7.0
LENGTHS = (5, 0, 71, 32)
SMALL = DecodeTuning(tile_tokens=16, least_tiles=1)


def make_batch(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int],
    queries: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, PagedKv]:
    torch.manual_seed(sum(lengths) + heads[2])
    kv = make_paged_kv(lengths, heads[1], heads[2], is_poisoned=True, dtype=dtype, device=DEVICE)
    q = torch.randn(len(lengths) * queries, heads[0], heads[2], dtype=dtype, device=DEVICE)
    return q, kv


def attend(
    q: torch.Tensor,
    kv: PagedKv,
    scratch: DecodeScratch | None = None,
    *,
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
    tuning: DecodeTuning = SMALL,
) -> torch.Tensor:
    out = torch.full_like(q, UNTOUCHED)
    if scratch is None:
        scratch = make_scratch(q.shape[0], q.shape[1], q.shape[2], 4, DEVICE)
    decode_attention(
        q,
        kv.keys,
        kv.values,
        kv.tables,
        kv.lengths,
        out,
        scratch,
        block_size=BLOCK_SIZE,
        scale=q.shape[2] ** -0.5,
        window=window,
        soft_cap=soft_cap,
        queries_per_sequence=queries,
        split_tokens=split_tokens,
        tuning=tuning,
    )
    return out


def expect(
    q: torch.Tensor,
    kv: PagedKv,
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    expected = torch.full(q.shape, UNTOUCHED, dtype=torch.float64, device=q.device)
    for row, length in enumerate(kv.lengths.tolist()):
        if length:
            rows = slice(row * queries, (row + 1) * queries)
            positions = range(length - queries, length)
            expected[rows] = attend_exactly(
                q[rows], kv, row, positions, window=window, soft_cap=soft_cap
            )
    return expected


@pytest.mark.parametrize("split_tokens", [None, 32])
@pytest.mark.parametrize(
    "heads", [(8, 2, 64), (4, 4, 80), (6, 2, 96), (4, 1, 128), (2, 1, 256), (20, 1, 16)]
)
def test_each_sequence_attends_to_all_of_its_kv(
    heads: tuple[int, int, int], split_tokens: int | None
) -> None:
    q, kv = make_batch(LENGTHS, heads)
    out = attend(q, kv, split_tokens=split_tokens)
    assert relative_error(out, expect(q, kv)) < 1e-6


def test_rows_of_padding_are_left_as_they_are() -> None:
    q, kv = make_batch((0, 20, 0), (4, 2, 16))
    out = attend(q, kv)
    assert bool((out[[0, 2]] == UNTOUCHED).all())
    assert not bool((out[1] == UNTOUCHED).any())


@pytest.mark.parametrize("queries", [2, 9])
def test_several_tokens_of_a_sequence_see_themselves_and_what_is_before(queries: int) -> None:
    # 9 tokens of 8 heads are more rows than one program takes.
    q, kv = make_batch((9, 0, 65), (8, 1, 16), queries)
    out = attend(q, kv, queries=queries)
    assert relative_error(out, expect(q, kv, queries)) < 1e-6


@pytest.mark.parametrize(("window", "queries"), [(1, 3), (16, 1), (33, 3), (1000, 1)])
def test_a_window_hides_what_is_older(window: int, queries: int) -> None:
    q, kv = make_batch((3, 65, 80), (4, 2, 16), queries)
    out = attend(q, kv, queries=queries, window=window)
    assert relative_error(out, expect(q, kv, queries, window)) < 1e-6


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_a_soft_cap_squeezes_scores(soft_cap: float) -> None:
    q, kv = make_batch(LENGTHS, (4, 2, 16))
    out = attend(q, kv, soft_cap=soft_cap)
    assert relative_error(out, expect(q, kv, soft_cap=soft_cap)) < 1e-6


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is meant
def test_huge_scores_neither_overflow_nor_escape_the_soft_cap() -> None:
    q, kv = make_batch((40, 64), (4, 2, 16))
    out = attend(q * 1e4, kv, soft_cap=20.0)
    assert relative_error(out, expect(q * 1e4, kv, soft_cap=20.0)) < 1e-5


def test_half_precision_is_as_near_as_its_rounding() -> None:
    q, kv = make_batch(LENGTHS, (8, 2, 64), dtype=torch.float16)
    assert relative_error(attend(q, kv), expect(q, kv)) < 1e-3


def test_what_scratch_held_before_matters_not() -> None:
    q, kv = make_batch((100, 70, 33), (4, 2, 16))
    scratch = make_scratch(8, 4, 16, 8, DEVICE)
    for split_tokens in (None, 16):
        first = attend(q, kv, scratch, split_tokens=split_tokens)
        scratch.partials.fill_(float("nan"))
        scratch.log_sums.fill_(float("nan"))
        assert torch.equal(attend(q, kv, scratch, split_tokens=split_tokens), first)


def test_a_fixed_split_size_makes_a_row_independent_of_its_batch() -> None:
    q, kv = make_batch((50, 100, 7, 90, 64), (4, 2, 16))
    scratch = make_scratch(8, 4, 16, 8, DEVICE)
    together = attend(q, kv, scratch, split_tokens=32)
    for row in range(5):
        alone = replace(kv, tables=kv.tables[row : row + 1], lengths=kv.lengths[row : row + 1])
        out = attend(q[row : row + 1], alone, scratch, split_tokens=32)
        assert torch.equal(out[0], together[row])


def test_a_verified_token_has_the_bits_of_a_decoded_one() -> None:
    q, kv = make_batch((70, 33), (4, 2, 16), 3)
    scratch = make_scratch(8, 4, 16, 8, DEVICE)
    together = attend(q, kv, scratch, queries=3, split_tokens=32).unflatten(0, (2, 3))
    for back in range(3):
        shorter = replace(kv, lengths=kv.lengths - 2 + back)
        out = attend(q[back::3], shorter, scratch, split_tokens=32)
        assert torch.equal(out, together[:, back])


def test_more_splits_than_scratch_has_room_for_grow_longer_instead() -> None:
    q, kv = make_batch((100, 64), (4, 2, 16))
    scratch = make_scratch(2, 4, 16, 2, DEVICE)
    for split_tokens in (None, 16):
        out = attend(q, kv, scratch, split_tokens=split_tokens)
        assert relative_error(out, expect(q, kv)) < 1e-6


def test_a_launch_of_more_rows_than_the_scratch_is_refused() -> None:
    q, kv = make_batch((4, 4, 4), (4, 2, 16))
    with pytest.raises(AssertionError):
        attend(q, kv, make_scratch(2, 4, 16, 2, DEVICE))
