"""Penalties and biases, against a plain reference and against transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, sample
from tests.support.draws import GREEDY, logits_of

PROMPT_IDS = (3, 3, 17, 40)
OUTPUT_IDS = (5, 17, 5, 5, 90)
SHAPED = SamplingParams(
    temperature=0.0,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias=((2, 1.5), (17, -2.0), (60, 0.25)),
    min_tokens=8,
)
STOP_IDS = frozenset({2, 7})


def shape_with_numpy(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The plain reference: bias, repetition, frequency, presence, stop ids, one token at a time."""
    shaped = logits.numpy().astype(np.float32).copy()
    for token_id, bias in params.logit_bias:
        shaped[token_id] += np.float32(bias)
    for token_id in {*PROMPT_IDS, *OUTPUT_IDS}:
        factor = np.float32(params.repetition_penalty)
        shaped[token_id] = (
            shaped[token_id] / factor if shaped[token_id] > 0 else shaped[token_id] * factor
        )
    for token_id in set(OUTPUT_IDS):
        times = OUTPUT_IDS.count(token_id)
        shaped[token_id] -= params.frequency_penalty * times + params.presence_penalty
    for token_id in STOP_IDS:
        shaped[token_id] = -np.inf
    return shaped


def rank_by_greed(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """Takes the best token again and again, each time without those taken before."""
    taken: list[int] = []
    for _ in range(count):
        rest = logits.clone()
        rest[taken] = -1e9
        row = SamplingRow(
            params=params,
            output_index=len(OUTPUT_IDS),
            stop_ids=STOP_IDS,
            prompt_ids=PROMPT_IDS,
            output_ids=OUTPUT_IDS,
        )
        taken.append(sample(rest, row).token_id)
    return taken


@pytest.mark.parametrize("seed", range(4))
def test_penalties_and_biases_equal_a_plain_reference(seed: int) -> None:
    logits = logits_of(100, seed)
    shaped = shape_with_numpy(logits, SHAPED)
    assert rank_by_greed(logits, SHAPED, 60) == np.argsort(-shaped, kind="stable")[:60].tolist()


def test_each_penalty_alone_moves_the_token_it_should() -> None:
    logits = torch.tensor([1.0, 2.0, 1.9, -1.0])

    def best(prompt: tuple[int, ...], output: tuple[int, ...], **params: float) -> int:
        row = SamplingRow(
            params=replace(GREEDY, **params),
            output_index=len(output),
            prompt_ids=prompt,
            output_ids=output,
        )
        return sample(logits, row).token_id

    assert best((1,), (), presence_penalty=0.5, frequency_penalty=0.5) == 1
    assert best((), (1,), presence_penalty=0.5) == 2
    assert best((), (1,), frequency_penalty=0.05) == 1
    assert best((), (1, 1, 1), frequency_penalty=0.05) == 2
    assert best((1,), (), repetition_penalty=1.2) == 2
    assert best((), (2,), presence_penalty=-0.5) == 2


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty=1.4)
    for seed in range(4):
        logits = logits_of(100, seed)
        history = torch.tensor([[*PROMPT_IDS, *OUTPUT_IDS]])
        expected = int(processor(history, logits[None].clone())[0].argmax())
        row = SamplingRow(
            params=replace(GREEDY, repetition_penalty=1.4),
            output_index=5,
            prompt_ids=PROMPT_IDS,
            output_ids=OUTPUT_IDS,
        )
        assert sample(logits, row).token_id == expected


def test_A14_logprobs_do_not_see_penalties_and_biases() -> None:
    logits = logits_of(100)
    row = SamplingRow(
        params=replace(SHAPED, logprobs=4),
        output_index=5,
        prompt_ids=PROMPT_IDS,
        output_ids=OUTPUT_IDS,
    )
    token = sample(logits, row)
    assert token.logprobs is not None
    expected = logits.double().log_softmax(0)
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]))
    assert [i for i, _ in token.logprobs.top] == expected.topk(4).indices.tolist()


def test_D4_penalties_at_their_limits_give_a_token() -> None:
    for values in ([3e38, -3e38, 0.0, 1.0], [-math.inf] * 4, [math.nan] * 4):
        row = SamplingRow(
            params=SamplingParams(
                repetition_penalty=0.01,
                presence_penalty=-2,
                frequency_penalty=-2,
                logit_bias=((0, 100.0), (99, 1.0)),
                min_p=1.0,
            ),
            output_index=4,
            prompt_ids=(0, 1),
            output_ids=(0, 1, 2, 3),
        )
        assert 0 <= sample(torch.tensor(values), row).token_id < 4
