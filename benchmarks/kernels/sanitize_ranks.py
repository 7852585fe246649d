"""Launches the kernels of tensor ranks, for `sanitize_calls`: the other ranks are faked."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pdserve.kernels.all_gather import gather_over_ranks
from pdserve.kernels.all_reduce import add_norm_over_ranks
from pdserve.kernels.peer_ring import EMPTY_WORD, NUM_SLOTS, NUM_STATE_WORDS, PeerRing
from pdserve.kernels.sampling_state import DeviceSampling
from pdserve.kernels.shared_choice import (
    FOUND_WORDS,
    choose_in_share,
    count_chunks,
    join_shares,
)
from pdserve.kernels.two_shot import add_norm_in_two_shots
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow

NUM_RANKS = 3
WORDS = 1024
ROUNDS = 5
Variants = Callable[[], Iterator[tuple[int, torch.dtype, bool]]]


def make_ring(device: torch.device) -> PeerRing:
    """Returns the ring of rank 1; every word of all slots has arrived already."""
    shape = (NUM_SLOTS.value, NUM_RANKS - 1, WORDS)
    rings = [torch.full(shape, EMPTY_WORD.value, dtype=torch.int32) for _ in range(NUM_RANKS)]
    rings[1].zero_()
    placed = tuple(ring.to(device) for ring in rings)
    return PeerRing(
        rank=1,
        rings=placed,
        halves=tuple(ring.view(torch.int16) for ring in placed),
        state=torch.zeros(NUM_STATE_WORDS, dtype=torch.int32).to(device),
        max_programs=4,
        max_polls=10,
    )


def refill(ring: PeerRing) -> None:
    """Lets the other ranks have sent the next round."""
    ring.rings[1].copy_(torch.zeros_like(ring.rings[1], device="cpu"))


def call_sums(device: torch.device, variants: Variants) -> None:
    """Sums rows in one shot and in two."""
    for num_splits, dtype, use_pdl in variants():
        for num_rows, add in (
            (1, add_norm_over_ranks),
            (7, add_norm_over_ranks),
            (7, add_norm_in_two_shots),
        ):
            ring = make_ring(device)
            x = torch.randn(num_splits, num_rows, 97).to(dtype).to(device)
            residual, out = torch.randn(num_rows, 97).to(dtype).to(device), None
            gain = torch.ones(97, dtype=dtype).to(device)
            for _ in range(ROUNDS):
                out = torch.full((num_rows, 97), torch.nan, dtype=dtype).to(device)
                add(x, residual, gain, out, ring, epsilon=1e-5, use_pdl=use_pdl)
                refill(ring)
            _check(ring, out)


def call_gather(device: torch.device, variants: Variants) -> None:
    """Gathers columns of unequal shares."""
    for _, _, use_pdl in variants():
        ring = make_ring(device)
        out = None
        for _ in range(ROUNDS):
            out = torch.full((5, 400), torch.nan).to(device)
            gather_over_ranks(torch.randn(5, 133).to(device), out, ring, use_pdl=use_pdl)
            refill(ring)
        _check(ring, out)


def call_shared_choice(device: torch.device, variants: Variants) -> None:
    """Chooses greedily and at random from shares of the vocabulary."""
    params = [SamplingParams(temperature=value, seed=3) for value in (0.0, 0.8, 1.5)]
    for _, _, use_pdl in variants():
        rows = DeviceSampling(len(params), 5001, device)
        rows.write(
            {
                row: SamplingRow(params=one, output_index=row, sample_index=0)
                for row, one in enumerate(params)
            }
        )
        logits = torch.randn(len(params), 5001).to(device)
        shape = (len(params), count_chunks(5001) + 1, FOUND_WORDS)
        found = torch.zeros(shape, dtype=torch.int32).to(device)
        ids = torch.full((len(params),), -1, dtype=torch.int32).to(device)
        logprobs = torch.full((len(params),), torch.nan).to(device)
        choose_in_share(logits, rows, found, first_id=0, has_logprobs=True, use_pdl=use_pdl)
        join_shares(found, rows, ids, logprobs, use_pdl=use_pdl)
        assert bool((ids.cpu() >= 0).all())
        assert bool(logprobs.cpu().isfinite().all())


def _check(ring: PeerRing, out: Tensor | None) -> None:
    assert out is not None
    assert bool(out.cpu().isfinite().all()), "an output holds NaN"
    assert not bool(ring.failed.cpu().any()), "a rank was missed"
