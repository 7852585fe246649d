"""Sums and gathers over ranks, the others faked: what they would send lies in the ring already."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdserve.config.shape import split_evenly
from pdserve.kernels.all_gather import gather_over_ranks
from pdserve.kernels.all_reduce import add_norm_over_ranks
from pdserve.kernels.peer_ring import EMPTY_WORD, NUM_SLOTS, NUM_STATE_WORDS, PeerRing
from pdserve.kernels.two_shot import add_norm_in_two_shots

EPSILON = 1e-5
WORDS = 4096
EMPTY = EMPTY_WORD.value
SLOTS = NUM_SLOTS.value


def make_ring(rank: int, num_ranks: int, max_programs: int = 8) -> PeerRing:
    shape = (SLOTS, num_ranks - 1, WORDS)
    rings = tuple(torch.full(shape, EMPTY, dtype=torch.int32) for _ in range(num_ranks))
    return PeerRing(
        rank=rank,
        rings=rings,
        halves=tuple(ring.view(torch.int16) for ring in rings),
        state=torch.zeros(NUM_STATE_WORDS, dtype=torch.int32),
        max_programs=max_programs,
        max_polls=3,
    )


def part_of(ring: PeerRing, owner: int, sender: int, slot: int) -> Tensor:
    """What a rank sends to another one."""
    return ring.rings[owner][slot, sender - (sender > owner)]


def put(ring: PeerRing, sender: int, values: Tensor, slot: int) -> None:
    """Lets a rank have sent something."""
    words = values.contiguous().view(torch.int32).flatten()
    part_of(ring, ring.rank, sender, slot)[: words.numel()] = words


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def add(
    ring: PeerRing, parts: list[Tensor], residual: Tensor, slot: int = 0, **over: bool
) -> tuple[Tensor, Tensor]:
    """Returns residual and normed rows of the ring's own rank."""
    for sender, part in enumerate(parts):
        if sender != ring.rank:
            put(ring, sender, part.sum(0).to(residual.dtype), slot)
    made, out = residual.clone(), torch.full_like(residual, torch.nan)
    gain = randn(residual.shape[1], seed=99).to(residual.dtype)
    add_norm_over_ranks(parts[ring.rank], made, gain, out, ring, epsilon=EPSILON, **over)
    return made, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "max_programs"), [(1, 8), (7, 8), (7, 3)])
def test_the_ranks_parts_are_added_to_the_residual_and_normed(
    dtype: torch.dtype, num_rows: int, max_programs: int
) -> None:
    parts = [randn(3, num_rows, 100, seed=seed) for seed in range(3)]
    residual = randn(num_rows, 100, seed=9).to(dtype)
    total = residual.float() + sum(part.sum(0).to(dtype).float() for part in parts)
    made, out = add(make_ring(1, 3, max_programs), parts, residual)
    torch.testing.assert_close(made, total.to(dtype), atol=1e-6, rtol=1e-6)
    scale = (made.float().square().mean(1, keepdim=True) + EPSILON).rsqrt()
    wanted = made.float() * scale * randn(100, seed=99).to(dtype).float()
    torch.testing.assert_close(out.float(), wanted, atol=2e-3, rtol=2e-3)


def test_all_ranks_get_the_same_bits_alone_and_among_other_rows() -> None:
    parts = [randn(2, 5, 64, seed=seed) * 10**seed for seed in range(4)]
    residual = randn(5, 64, seed=9)
    made = [add(make_ring(rank, 4), parts, residual)[0] for rank in range(4)]
    assert all(torch.equal(one, made[0]) for one in made)
    alone, _ = add(make_ring(2, 4), [part[:, 3:4] for part in parts], residual[3:4])
    assert torch.equal(alone, made[0][3:4])


def test_without_a_residual_the_sum_is_all_there_is() -> None:
    parts = [randn(1, 3, 64, seed=seed) for seed in range(2)]
    garbage = torch.full((3, 64), torch.nan)
    made, _ = add(make_ring(0, 2), parts, garbage, has_residual=False)
    torch.testing.assert_close(made, (parts[0] + parts[1])[0])


def test_what_is_sent_arrives_in_every_other_ring_and_minus_zero_as_zero() -> None:
    ring = make_ring(1, 3)
    parts = [randn(1, 2, 64, seed=seed).half() for seed in range(3)]
    parts[1][0, 0, :7] = -0.0
    add(ring, parts, randn(2, 64, seed=9).half())
    for owner in (0, 2):
        sent = part_of(ring, owner, 1, 0)[:64].view(torch.float16).view(2, 64)
        assert torch.equal(sent, parts[1][0])
        assert not torch.signbit(sent[0, :7]).any()
        assert (part_of(ring, owner, 1, 0)[64:] == EMPTY).all()


def test_a_round_clears_what_the_round_before_left_however_many_rows_it_has() -> None:
    ring = make_ring(0, 2)
    for number, num_rows in enumerate((1, 6, 2, 3, 5, 1, 4)):
        parts = [randn(1, num_rows, 50, seed=10 * number + rank) for rank in range(2)]
        add(ring, parts, randn(num_rows, 50, seed=9), slot=number % SLOTS)
        own = ring.rings[0]
        assert (own[(number - 1) % SLOTS] == EMPTY).all()
        assert (own[(number + 1) % SLOTS] == EMPTY).all()
        assert int((own[number % SLOTS] != EMPTY).sum()) == num_rows * 50
    assert not ring.failed.any()


def test_a_rank_that_sends_nothing_is_missed_and_later_rounds_do_not_wait() -> None:
    ring = make_ring(0, 2)
    x, residual = randn(1, 2, 64, seed=1), randn(2, 64, seed=2)
    gain, out = torch.ones(64), torch.empty(2, 64)
    add_norm_over_ranks(x, residual, gain, out, ring, epsilon=EPSILON)
    assert ring.failed.any()
    # More polls than any test has time for.
    late = replace(ring, max_polls=1 << 30)
    add_norm_over_ranks(x, residual, gain, out, late, epsilon=EPSILON)
    gather_over_ranks(randn(2, 3, seed=3), torch.empty(2, 6), late)
    assert ring.failed.any()


def test_a_rank_that_sends_a_part_of_a_row_is_missed() -> None:
    ring = make_ring(0, 2)
    put(ring, 1, randn(1, 64, seed=5)[:, :63], 0)
    x, residual = randn(1, 1, 64, seed=1), randn(1, 64, seed=2)
    add_norm_over_ranks(x, residual, torch.ones(64), residual.clone(), ring, epsilon=EPSILON)
    assert ring.failed.any()


@pytest.mark.parametrize(
    ("num_rows", "width", "num_ranks"), [(3, 12, 3), (2, 4501, 2), (5, 5000, 3)]
)
def test_columns_of_ranks_come_side_by_side(num_rows: int, width: int, num_ranks: int) -> None:
    ring = make_ring(1, num_ranks, max_programs=2)
    whole = randn(num_rows, width, seed=4)
    shares = split_evenly(width, num_ranks)
    padded = -(-len(shares[0]) // 4) * 4
    rows_at_once = WORDS // padded
    for sender, share in enumerate(shares):
        for number, start in enumerate(range(0, num_rows, rows_at_once)):
            rows = whole[start : start + rows_at_once, share.start : share.stop]
            if sender != 1:
                put(ring, sender, torch.nn.functional.pad(rows, (0, padded - len(share))), number)
    own = whole[:, shares[1].start : shares[1].stop].contiguous()
    out = torch.full_like(whole, torch.nan)
    gather_over_ranks(own, out, ring)
    assert torch.equal(out, whole)
    assert not ring.failed.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "rank"), [(3, 0), (7, 1), (8, 2)])
def test_in_two_shots_rows_are_summed_by_their_owner_and_come_from_others(
    dtype: torch.dtype, num_rows: int, rank: int
) -> None:
    ring = make_ring(rank, 3, max_programs=2)
    parts = [randn(2, num_rows, 50, seed=seed) for seed in range(3)]
    rounded = [part.sum(0).to(dtype) for part in parts]
    sums = sum(part.float() for part in rounded).to(dtype)
    residual = randn(num_rows, 50, seed=9).to(dtype)
    owners = torch.arange(num_rows) * 3 // num_rows
    for sender in {0, 1, 2} - {rank}:
        sent = torch.zeros(num_rows, 50, dtype=dtype)
        sent[owners == rank] = rounded[sender][owners == rank]
        sent[owners == sender] = sums[owners == sender]
        put(ring, sender, sent, 0)
    made, out = residual.clone(), torch.full_like(residual, torch.nan)
    add_norm_in_two_shots(
        parts[rank], made, torch.ones(50, dtype=dtype), out, ring, epsilon=EPSILON
    )
    assert torch.equal(made, (residual.float() + sums.float()).to(dtype))
    scale = (made.float().square().mean(1, keepdim=True) + EPSILON).rsqrt()
    torch.testing.assert_close(out.float(), made.float() * scale, atol=2e-3, rtol=2e-3)
    for peer in {0, 1, 2} - {rank}:
        told = part_of(ring, peer, rank, 0).view(dtype)[: num_rows * 50].view(num_rows, 50)
        assert torch.equal(told[owners == rank], sums[owners == rank])
        assert torch.equal(told[owners == peer], rounded[rank][owners == peer])
    assert not ring.failed.any()
