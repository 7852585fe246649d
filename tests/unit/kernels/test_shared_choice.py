from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdserve.config.shape import split_evenly
from pdserve.kernels.sampling import sample_rows
from pdserve.kernels.sampling_state import DeviceSampling
from pdserve.kernels.shared_choice import (
    FOUND_WORDS,
    choose_in_share,
    count_chunks,
    join_shares,
)
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.5, seed=2**63 + 5),
    SamplingParams(temperature=1e-4, seed=4),
)


def make_rows(params: Sequence[SamplingParams], vocab_size: int) -> DeviceSampling:
    rows = DeviceSampling(len(params), vocab_size, torch.device("cpu"))
    rows.write(
        {
            index: SamplingRow(params=one, output_index=5 + index, sample_index=index)
            for index, one in enumerate(params)
        }
    )
    return rows


def choose(
    logits: Tensor,
    params: Sequence[SamplingParams],
    num_ranks: int,
    *,
    has_logprobs: bool = True,
) -> tuple[list[int], Tensor, list[int]]:
    """Chooses over ranks; returns ids, log-probabilities and the output indices behind."""
    num_rows, vocab_size = logits.shape
    rows = make_rows(params, vocab_size)
    shares = split_evenly(vocab_size, num_ranks)
    num_chunks = count_chunks(len(shares[0]))
    found = torch.empty(num_rows, num_ranks, num_chunks, FOUND_WORDS, dtype=torch.int32)
    for rank, share in enumerate(shares):
        part = torch.empty(num_rows, num_chunks, FOUND_WORDS, dtype=torch.int32)
        mine = logits[:, share.start : share.stop]
        choose_in_share(mine, rows, part, first_id=share.start, has_logprobs=has_logprobs)
        found[:, rank] = part
    ids = torch.empty(num_rows, dtype=torch.int32)
    logprobs = torch.empty(num_rows)
    out_logprobs = logprobs if has_logprobs else None
    join_shares(found.view(num_rows, -1, FOUND_WORDS), rows, ids, out_logprobs)
    return ids.tolist(), logprobs, rows.fields[:, 6].tolist()


def choose_alone(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[list[int], Tensor]:
    rows = make_rows(params, logits.shape[1])
    ids = torch.empty(len(params), dtype=torch.int32)
    logprobs = torch.empty(len(params))
    sample_rows(logits, rows, ids, logprobs)
    return ids.tolist(), logprobs


@pytest.mark.parametrize("vocab_size", [5, 4099, 8192])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_choose_the_tokens_of_an_only_one(vocab_size: int, num_ranks: int) -> None:
    numbers = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(len(PARAMS), vocab_size, generator=numbers)
    expected, expected_logprobs = choose_alone(logits, PARAMS)
    ids, logprobs, indices = choose(logits, PARAMS, num_ranks)
    assert ids == expected
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)
    assert indices == [6, 7, 8, 9]


def test_of_equal_logits_on_several_ranks_the_lowest_id_is_taken() -> None:
    logits = torch.zeros(2, 6000)
    logits[0, [4500, 2999, 3000]] = 2.0
    logits[1, [5999, 3001]] = 2.0
    ids, _, _ = choose(logits, [PARAMS[0]] * 2, 2)
    assert ids == [2999, 3001]


@pytest.mark.filterwarnings("ignore:overflow")
def test_masked_tokens_are_never_drawn_and_nan_counts_as_least() -> None:
    logits = torch.full((2, 5000), -torch.inf)
    logits[0, 4000] = 1.0
    logits[1] = torch.nan
    logits[1, 7] = -1.0
    ids, _, _ = choose(logits, [PARAMS[1], PARAMS[0]], 2, has_logprobs=False)
    assert ids == [4000, 7]
