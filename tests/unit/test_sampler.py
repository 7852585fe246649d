import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, exponential_noise, sample, score_token
from tests.support.draws import GREEDY, draw, draw_many, logits_of

GOLDEN_NOISE = [1.3984413980280461, 1.347926573415443, 1.1877107548039318]
"""Computed with Python integers from the published SplitMix64."""


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals() -> None:
    logits = logits_of()
    assert draw(logits, GREEDY) == int(logits.argmax())
    assert draw(torch.tensor([0.0, 5.0, 5.0]), GREEDY) == 1


def test_the_same_seed_and_index_draw_the_same_token() -> None:
    logits = logits_of()
    params = SamplingParams(seed=7)
    assert draw_many(logits, params, 50) == draw_many(logits.clone(), params, 50)


def test_seed_output_index_and_sample_index_all_change_the_draw() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams(seed=7)
    draws = {
        draw(logits, params),
        draw(logits, replace(params, seed=8)),
        draw(logits, params, output_index=1),
        draw(logits, params, sample_index=1),
    }
    assert len(draws) == 4


def test_noise_is_pinned_so_that_every_process_draws_it() -> None:
    ids = np.array([0, 1, 49151], dtype=np.uint64)
    noise = exponential_noise(ids, seed=2**64 - 1, sample_index=3, output_index=1000)
    assert noise.tolist() == pytest.approx(GOLDEN_NOISE, rel=1e-12)


def test_a_token_s_noise_does_not_depend_on_the_other_candidates() -> None:
    every = exponential_noise(np.arange(500, dtype=np.uint64), 1, 0, 9)
    some = exponential_noise(np.array([499, 3], dtype=np.uint64), 1, 0, 9)
    assert some.tolist() == pytest.approx([float(every[499]), float(every[3])], rel=1e-12)


def test_noise_is_positive_finite_and_exponential() -> None:
    noise = exponential_noise(np.arange(200_000, dtype=np.uint64), 0, 0, 0)
    assert float(noise.min()) > 0
    assert float(noise.max()) < 37
    assert float(noise.mean()) == pytest.approx(1, abs=0.01)
    assert float((noise > 2).double().mean()) == pytest.approx(math.exp(-2), abs=0.005)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = logits_of(12, scale=1.5)
    count = 4000
    draws = draw_many(logits, SamplingParams(temperature=temperature, seed=3), count)
    seen = torch.bincount(torch.tensor(draws), minlength=12).double()
    expected = (logits.double() / temperature).softmax(0) * count
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # the 0.1 % point with 11 degrees of freedom


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = logits_of()
    best = set(logits.topk(5).indices.tolist())
    draws = draw_many(logits, SamplingParams(temperature=5.0, top_k=5), 300)
    assert set(draws) == best


def test_top_k_of_one_is_greedy_and_a_large_one_is_off() -> None:
    logits = logits_of()
    assert draw(logits, SamplingParams(top_k=1, seed=5)) == int(logits.argmax())
    free = draw_many(logits, SamplingParams(), 50)
    assert draw_many(logits, SamplingParams(top_k=10**9), 50) == free


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.4, {0}), (0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.9, {0, 1, 2})],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, expected: set[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log().float()
    draws = draw_many(logits + 3, SamplingParams(top_p=top_p - 1e-6), 200)
    assert set(draws) == expected


def test_top_p_over_a_flat_large_vocabulary_keeps_its_share() -> None:
    logits = torch.zeros(8000)
    draws = draw_many(logits, SamplingParams(top_p=0.5), 200)
    assert len(set(draws)) > 150
    assert draw(logits, SamplingParams(top_p=1e-9)) in range(8000)


def draw_in_order(logits: torch.Tensor, row: SamplingRow) -> int:
    """Draws as the sampler must: tokens stand in the order of logits, and then of ids."""
    params = row.params
    order = logits.double().sort(descending=True, stable=True)
    scaled = (order.values - order.values[0]) / params.temperature
    ids = order.indices
    if params.top_k:
        scaled, ids = scaled[: params.top_k], ids[: params.top_k]
    if params.min_p:
        is_likely = scaled >= math.log(params.min_p)
        scaled, ids = scaled[is_likely], ids[is_likely]
    mass = scaled.exp()
    is_kept = (mass.cumsum(0) - mass) / mass.sum() < params.top_p
    scaled, ids = scaled[is_kept], ids[is_kept]
    noise = exponential_noise(
        ids.numpy().astype(np.uint64), params.seed, row.sample_index, row.output_index
    )
    return int(ids[int((scaled.exp() / noise).argmax())])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=3.0, top_k=20, top_p=0.5, min_p=0.01),
        SamplingParams(temperature=2.0, top_p=0.37),
        SamplingParams(temperature=8.0, top_p=0.9),
        SamplingParams(temperature=3.0, top_k=1001, top_p=0.83),
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=8.0, top_k=4000),
        SamplingParams(temperature=8.0, min_p=0.3),
    ],
)
def test_of_tied_logits_the_lowest_ids_are_kept_at_every_edge(params: SamplingParams) -> None:
    for seed in range(20):
        logits = logits_of(9000, seed=seed).bfloat16().float()
        row = SamplingRow(params=params, output_index=seed)
        assert sample(logits, row).token_id == draw_in_order(logits, row)


def test_among_equal_logits_the_lowest_ids_are_kept() -> None:
    logits = torch.zeros(4000)
    logits[[17, 3000]] = 1.0
    assert set(draw_many(logits, SamplingParams(temperature=9.0, top_k=4), 200)) == {0, 1, 17, 3000}
    top_p = (2 * math.e + 10.5) / (2 * math.e + 3998)
    draws = draw_many(logits, SamplingParams(top_p=top_p), 300)
    assert set(draws) <= {*range(11), 17, 3000}
    assert set(draws) >= {17, 3000}
    assert len(set(draws)) > 6


def test_filters_leave_the_noise_of_kept_tokens_alone() -> None:
    logits = logits_of(50, scale=4.0)
    free = draw_many(logits, SamplingParams(), 200)
    filtered = draw_many(logits, SamplingParams(top_k=10, top_p=0.999), 200)
    best = set(logits.topk(5).indices.tolist())
    kept = [(a, b) for a, b in zip(free, filtered, strict=True) if a in best]
    assert len(kept) > 50
    assert all(a == b for a, b in kept)


def test_stop_ids_cannot_be_chosen_before_min_tokens() -> None:
    logits = torch.tensor([0.0, 9.0, 3.0])
    params = replace(GREEDY, min_tokens=2)
    stop_ids = frozenset({1, 999})
    chosen = [draw(logits, params, index, stop_ids) for index in range(3)]
    assert chosen == [2, 2, 1]
    warm = replace(params, temperature=1.0)
    assert 1 not in [draw(logits, replace(warm, seed=s), 0, stop_ids) for s in range(50)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    list(itertools.product((1e-310, 1e-40, 1e-6, 1.0, 1e6, 1e300), (0, 1, 3), (1e-12, 0.5, 1.0))),
)
@pytest.mark.parametrize(
    "values",
    [
        [0.0, 1.0, 2.0, -1.0],
        [1e38, -1e38, 0.0, 3.4e38],
        [math.nan, 1.0, -math.inf, 0.5],
        [math.inf, 1.0, 0.0, -math.inf],
        [-math.inf] * 4,
        [math.nan] * 4,
    ],
)
def test_D4_extremes_give_a_token_and_finite_logprobs(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, logprobs=2)
    token = sample(torch.tensor(values), SamplingRow(params=params, output_index=0))
    assert 0 <= token.token_id < 4
    assert token.logprobs is not None
    assert math.isfinite(token.logprobs.logprob)
    assert all(math.isfinite(logprob) for _, logprob in token.logprobs.top)


def test_D4_a_tiny_temperature_is_greedy() -> None:
    logits = logits_of()
    draws = draw_many(logits, SamplingParams(temperature=1e-310), 20)
    assert set(draws) == {int(logits.argmax())}


def test_A14_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = logits_of()
    expected = logits.double().log_softmax(0)
    params = SamplingParams(temperature=0.3, top_k=4, min_tokens=5, logprobs=3)
    stop_ids = frozenset({int(logits.argmax())})
    row = SamplingRow(params=params, output_index=0, stop_ids=stop_ids)
    token = sample(logits, row)
    assert token.logprobs is not None
    assert token.logprobs.token_id == token.token_id
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]))
    best = expected.topk(3)
    assert [token_id for token_id, _ in token.logprobs.top] == best.indices.tolist()
    assert [value for _, value in token.logprobs.top] == pytest.approx(best.values.tolist())


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_reports_nothing() -> None:
    row = SamplingRow(params=replace(GREEDY, logprobs=0), output_index=0)
    token = sample(logits_of(), row)
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert sample(logits_of(), SamplingRow(params=GREEDY, output_index=0)).logprobs is None


def test_sampling_leaves_the_logits_alone() -> None:
    logits = logits_of()
    before = logits.clone()
    row = SamplingRow(
        params=SamplingParams(min_tokens=1, top_p=0.5, logprobs=1),
        output_index=0,
        stop_ids=frozenset({3}),
    )
    sample(logits, row)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"min_p": 0.2}, transformers.MinPLogitsWarper(0.2)),
        ({"min_p": 1.0}, transformers.MinPLogitsWarper(1.0)),
        ({"top_k": 7}, transformers.TopKLogitsWarper(7)),
        ({"top_p": 0.7}, transformers.TopPLogitsWarper(0.7)),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(params, warper) -> None:
    logits = logits_of(40, 3)
    temperature = 1.7
    warped = warper(torch.zeros(1, 1, dtype=torch.int64), (logits / temperature)[None].clone())
    kept = set((warped[0] > -torch.inf).nonzero().squeeze(1).tolist())
    settings = SamplingParams(temperature=temperature, **params)
    draws = set(draw_many(logits, settings, 3000))
    assert draws <= kept
    # Whatever is kept is drawn in time; the least likely one has at least a share of 1 in 300.
    shares = torch.softmax(warped[0], 0)
    assert {token for token in kept if shares[token] > 1 / 300} <= draws


def test_min_p_comes_with_top_k_and_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    draws = draw_many(logits, SamplingParams(min_p=0.4, top_k=4, top_p=0.7), 300)
    # Of 0.4, 0.3 and 0.2, which min_p leaves, the first two are 78 %.
    assert set(draws) == {0, 1}


def test_a_given_token_is_scored_whether_likely_or_not() -> None:
    logits = logits_of(50, 1)
    expected = logits.double().log_softmax(0)
    for token_id in (int(logits.argmin()), 4, int(logits.argmax())):
        scored = score_token(logits, token_id, 2)
        assert scored.token_id == token_id
        assert scored.logprob == pytest.approx(float(expected[token_id]))
        assert [i for i, _ in scored.top] == expected.topk(2).indices.tolist()
