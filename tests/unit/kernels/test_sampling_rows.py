from dataclasses import replace

import pytest
import torch

from pdserve.kernels.sampling_rows import HostSampler, is_plain
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, sample

PLAIN = SamplingParams(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=3, logprobs=0)


def row_of(params: SamplingParams, output_index: int = 0) -> SamplingRow:
    return SamplingRow(params=params, output_index=output_index, stop_ids=frozenset({2}))


def test_temperature_filters_and_the_choice_s_log_probability_are_plain() -> None:
    assert is_plain(row_of(PLAIN))


@pytest.mark.parametrize(
    "params",
    [
        replace(PLAIN, presence_penalty=0.5),
        replace(PLAIN, frequency_penalty=0.5),
        replace(PLAIN, repetition_penalty=1.1),
        replace(PLAIN, logit_bias=((3, 1.0),)),
        replace(PLAIN, logprobs=2),
    ],
)
def test_what_needs_more_than_the_logits_is_not_plain(params: SamplingParams) -> None:
    assert not is_plain(row_of(params))


def test_a_row_is_plain_once_its_stop_ids_are_free() -> None:
    params = replace(PLAIN, min_tokens=2)
    assert [is_plain(row_of(params, index)) for index in range(3)] == [False, False, True]
    assert is_plain(replace(row_of(params), stop_ids=frozenset()))


def test_other_rows_are_sampled_by_the_cpu_s_rules_and_counted() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = {
        3: row_of(replace(PLAIN, logprobs=2)),
        1: replace(row_of(replace(PLAIN, presence_penalty=2.0), 2), output_ids=(5, 6)),
    }
    sampler = HostSampler()
    tokens = sampler.sample(logits, rows)
    assert tokens == {index: sample(logits[index], row) for index, row in rows.items()}
    assert sampler.num_sampled == 2
    assert sampler.sample(logits, {}) == {}
    assert sampler.num_sampled == 2
