"""Chooses tokens from logits. The choice is a pure function of logits, parameters and known tokens.

In this order, which is vLLM's: the bias is added to the raw logits; the repetition penalty, then
frequency and presence penalties; stop ids are masked before `min_tokens`; temperature; `min_p`,
`top_k`, `top_p`; the draw. Greedy choice takes the best after the mask. Log-probabilities are
those of the raw logits. Counts are made anew from the known tokens at each step: nothing is kept
that a replay would not have.

Tokens with equal logits stand in the order of their ids: where a filter ends among them it keeps
the lowest ids, and greedy choice takes the first.

Randomness is counter-based: the noise of a token is a hash of (seed, sample index, output index,
token id), so a replay on any process draws the same noise. With E exponential noise, the token that
maximises `probability / E` is an exact sample: the exponential race, the same thing as the
Gumbel-max trick (Maddison, Tarlow and Minka, "A* Sampling", section 2) with one logarithm less.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.request import SampledToken, SamplingParams, TokenLogprobs

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
UINT64_MASK = 2**64 - 1
FIRST_CANDIDATES = 1024
"""A top-p set larger than this is rare; only then is the whole vocabulary sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with."""

    params: SamplingParams
    output_index: int
    stop_ids: frozenset[int] = frozenset()
    """Cannot be chosen before `params.min_tokens` output tokens."""
    sample_index: int = 0
    """Which of several samples of one prompt."""
    prompt_ids: tuple[int, ...] = ()
    """Only for the repetition penalty."""
    output_ids: tuple[int, ...] = ()
    """All output tokens so far; only for penalties."""


def sample(logits_V: Tensor, row: SamplingRow) -> SampledToken:  # noqa: N803
    """Chooses the next token.

    Args:
        logits_V: float32 [vocab_size]; not changed. NaN counts as the least likely.
        row: how to choose.
    """
    least = torch.finfo(logits_V.dtype).min
    raw = torch.nan_to_num(logits_V, nan=least, neginf=least)
    allowed = _without_stop_ids(_penalize(_add_bias(raw, row.params), row), row)
    is_greedy = row.params.temperature == 0
    token_id = int(allowed.argmax()) if is_greedy else _draw(allowed, row)
    if row.params.logprobs is None:
        return SampledToken(token_id=token_id)
    return SampledToken(token_id=token_id, logprobs=_logprobs(raw, token_id, row.params.logprobs))


def score_token(logits_V: Tensor, token_id: int, num_top: int) -> TokenLogprobs:  # noqa: N803
    """Returns the log-probability of a given token, and the `num_top` most likely ones.

    Args:
        logits_V: float32 [vocab_size]; not changed. NaN counts as the least likely.
        token_id: the token to report.
        num_top: alternatives to report.
    """
    least = torch.finfo(logits_V.dtype).min
    return _logprobs(torch.nan_to_num(logits_V, nan=least, neginf=least), token_id, num_top)


def exponential_noise(
    token_ids: np.ndarray[tuple[int], np.dtype[np.uint64]],
    seed: int,
    sample_index: int,
    output_index: int,
) -> Tensor:
    """Returns one exponential variate per token, float64, in (0, 37]."""
    key = np.array([seed & UINT64_MASK], dtype=np.uint64)
    for counter in (sample_index, output_index):
        key = _mix(key + GOLDEN_GAMMA * np.array([counter + 1], dtype=np.uint64))
    bits = _mix(key + GOLDEN_GAMMA * (token_ids + np.uint64(1)))
    # 52 bits and a half: neither 0 nor, after rounding, 1.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy(uniform).log().neg()


def _mix(
    state: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Scrambles 64 bits: the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))


def _add_bias(logits: Tensor, params: SamplingParams) -> Tensor:
    inside = [(token_id, bias) for token_id, bias in params.logit_bias if token_id < len(logits)]
    if not inside:
        return logits
    ids, values = zip(*inside, strict=True)
    biased = logits.clone()
    biased[torch.tensor(ids)] += torch.tensor(values, dtype=logits.dtype)
    return biased


def _penalize(logits: Tensor, row: SamplingRow) -> Tensor:
    """Makes tokens that were there already less likely.

    Repetition after Keskar et al., "CTRL" (2019), section 4.1, over prompt and output; frequency
    and presence as in the OpenAI API, over the output alone.
    """
    params = row.params
    if not params.has_penalties:
        return logits
    penalized = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}))
        values = penalized[seen]
        factor = params.repetition_penalty
        penalized[seen] = torch.where(values > 0, values / factor, values * factor)
    counts = Counter(row.output_ids)
    if counts:
        ids = torch.tensor(list(counts))
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        penalized[ids] -= params.frequency_penalty * times + params.presence_penalty
    limits = torch.finfo(logits.dtype)
    return penalized.clamp(limits.min, limits.max)


def _without_stop_ids(logits: Tensor, row: SamplingRow) -> Tensor:
    if row.output_index >= row.params.min_tokens or not row.stop_ids:
        return logits
    masked = logits.clone()
    inside = [token_id for token_id in row.stop_ids if token_id < masked.shape[0]]
    masked[inside] = -torch.inf
    return masked


def _draw(logits: Tensor, row: SamplingRow) -> int:
    """Samples at a temperature over 0, within min-p, top-k and then top-p."""
    params = row.params
    kept = logits
    ids: Tensor | None = None
    if 0 < params.top_k < logits.shape[0]:
        # In the order of ids, which decides again at the edge of top-p.
        ids = _most_likely(logits, params.top_k).sort().values
        kept = logits[ids]
    # The difference first, so that no temperature however small makes infinity minus infinity.
    scaled = (kept.double() - logits.max().double()) / params.temperature
    if params.min_p > 0:
        # The most likely token has a scaled logit of 0.
        is_likely = scaled >= math.log(params.min_p)
        ids = is_likely.nonzero().squeeze(1) if ids is None else ids[is_likely]
        kept, scaled = kept[is_likely], scaled[is_likely]
    if params.top_p < 1:
        places = _top_p(kept, scaled, params.top_p)
        ids = places if ids is None else ids[places]
        scaled = scaled[places]
    if ids is None:
        token_ids = np.arange(scaled.shape[0], dtype=np.uint64)
    else:
        token_ids = ids.numpy().astype(np.uint64)
    noise = exponential_noise(token_ids, params.seed, row.sample_index, row.output_index)
    return int(token_ids[int((scaled.exp() / noise).argmax())])


def _most_likely(logits: Tensor, num_kept: int) -> Tensor:
    """Returns the places of so many of the greatest logits; of equal ones the first."""
    values, places = logits.topk(min(num_kept + 1, logits.shape[0]))
    return _cut(logits, values, places, num_kept)


def _top_p(logits: Tensor, scaled: Tensor, top_p: float) -> Tensor:
    """Returns the places of the fewest tokens that add up to `top_p`, the most likely, at least 1.

    Args:
        logits: of the tokens, which order them.
        scaled: logarithms of their probabilities, up to a constant.
        top_p: a share.
    """
    total = scaled.exp().sum()
    num_all = logits.shape[0]
    for num_candidates in (min(FIRST_CANDIDATES, num_all), num_all):
        values, places = logits.topk(num_candidates)
        cumulative = scaled[places].exp().cumsum(0) / total
        num_kept = int((cumulative < top_p).sum()) + 1
        if num_kept < num_candidates:
            break
    return _cut(logits, values, places, min(num_kept, num_all))


def _cut(logits: Tensor, values: Tensor, places: Tensor, num_kept: int) -> Tensor:
    """Returns the first places of a `topk` that goes on behind them, if there is more.

    Of equal logits it takes any, and a bfloat16 leaves hundreds of them: which of those at the edge
    are kept would depend on the machine.
    """
    edge = values[num_kept - 1]
    if num_kept < values.shape[0] and values[num_kept] == edge:
        over = places[values > edge]
        equal = (logits == edge).nonzero().squeeze(1)
        return torch.cat((over, equal[: num_kept - over.shape[0]]))
    return places[:num_kept]


def _logprobs(raw: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Reports log-probabilities of the model itself, before temperature and filters."""
    logprobs = raw.double().log_softmax(0)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id=token_id, logprob=float(logprobs[token_id]), top=top)
