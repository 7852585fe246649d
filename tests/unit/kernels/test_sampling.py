import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from pdserve.kernels.sampling import sample_rows
from pdserve.kernels.sampling_state import CHUNK, DeviceSampling, RowKind
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, sample

GREEDY = SamplingParams(temperature=0)
VOCAB = 2 * CHUNK + 77


@dataclass
class Outcome:
    """What one launch wrote."""

    ids: list[int]
    logprobs: torch.Tensor
    rows: DeviceSampling

    @property
    def output_indices(self) -> list[int]:
        indices: list[int] = self.rows.fields[:, 6].tolist()
        return indices


def logits_of(num_rows: int, vocab_size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def rows_of(params: Sequence[SamplingParams]) -> list[SamplingRow]:
    return [
        SamplingRow(params=one, output_index=3 * index, sample_index=index % 2)
        for index, one in enumerate(params)
    ]


def run(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Outcome:
    device_rows = DeviceSampling(len(rows), logits.shape[1], logits.device)
    device_rows.write(dict(enumerate(rows)))
    ids = torch.full((len(rows),), -7, dtype=torch.int32)
    logprobs = torch.full((len(rows),), torch.nan)
    sample_rows(logits, device_rows, ids, logprobs)
    return Outcome(ids.tolist(), logprobs, device_rows)


def on_cpu(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    return [sample(one.float(), row).token_id for one, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("vocab_size", [1, 63, CHUNK, VOCAB])
def test_greedy_rows_take_the_most_likely_token(vocab_size: int) -> None:
    logits = logits_of(3, vocab_size)
    assert run(logits, rows_of([GREEDY] * 3)).ids == logits.argmax(1).tolist()


def test_the_first_of_equally_likely_tokens_is_taken() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [700, CHUNK + 5, VOCAB - 1]] = 4.0
    logits[2, [CHUNK + 9, CHUNK + 3]] = 4.0
    assert run(logits, rows_of([GREEDY] * 3)).ids == [0, 700, CHUNK + 3]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_nan_and_infinities_count_as_on_the_cpu() -> None:
    logits = logits_of(4)
    logits[0, :50] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, [9, 800]] = torch.inf
    rows = rows_of([GREEDY] * 4)
    assert run(logits, rows).ids == on_cpu(logits, rows)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = logits_of(3)
    params = [GREEDY, SamplingParams(temperature=2.0), SamplingParams(temperature=0.5, top_k=3)]
    out = run(logits, rows_of(params))
    expected = logits.double().log_softmax(1)[range(3), out.ids]
    torch.testing.assert_close(out.logprobs.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 4.0])
def test_draws_from_the_whole_vocabulary_are_those_of_the_cpu(
    dtype: torch.dtype, temperature: float
) -> None:
    logits = logits_of(5).to(dtype)
    rows = rows_of([SamplingParams(temperature=temperature, seed=s) for s in range(5)])
    assert run(logits, rows).ids == on_cpu(logits, rows)


def test_seeds_use_all_64_bits() -> None:
    logits = torch.zeros(3, VOCAB)
    rows = rows_of([SamplingParams(seed=s) for s in (2**64 - 1, 2**63, 2**32 + 1)])
    assert run(logits, rows).ids == on_cpu(logits, rows)


FILTERS = {
    "top_k 1": SamplingParams(top_k=1),
    "top_k 20": SamplingParams(top_k=20, temperature=0.9),
    "top_p 0.6": SamplingParams(top_p=0.6, temperature=0.7),
    "tiny top_p": SamplingParams(top_p=1e-9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "min_p 1": SamplingParams(min_p=1.0),
    "top_k, min_p and top_p": SamplingParams(top_k=30, min_p=0.02, top_p=0.8, temperature=1.3),
    "top_k and top_p": SamplingParams(top_k=40, top_p=0.95, temperature=1.5),
    "large top_k off": SamplingParams(top_k=10**9),
}
WIDE_FILTERS = {
    "flat top_p": SamplingParams(top_p=0.9, temperature=8.0),
    "large top_k": SamplingParams(top_k=2500, temperature=8.0),
    "large top_k and top_p": SamplingParams(top_k=3000, top_p=0.9, temperature=8.0),
    "small min_p": SamplingParams(min_p=1e-4, temperature=8.0),
    "all of them": SamplingParams(top_k=3500, top_p=0.95, min_p=0.01, temperature=9.0),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_keep_the_tokens_of_the_cpu(name: str) -> None:
    # Longer than what the quick search looks into, so that the bound matters.
    logits = logits_of(3, 5 * CHUNK - 11)
    rows = rows_of([FILTERS[name]] * 3)
    out = run(logits, rows)
    assert out.ids == on_cpu(logits, rows)
    assert out.output_indices == [1, 4, 7]


@pytest.mark.parametrize("name", WIDE_FILTERS)
def test_filters_that_keep_thousands_of_tokens_are_those_of_the_cpu(name: str) -> None:
    logits = logits_of(2)
    rows = rows_of([WIDE_FILTERS[name]] * 2)
    out = run(logits, rows)
    assert out.ids == on_cpu(logits, rows)
    assert out.output_indices == [1, 4]
    assert not bool(out.rows.is_wide.any())


def test_logits_of_all_magnitudes_are_searched() -> None:
    generator = torch.Generator().manual_seed(4)
    magnitudes = 10.0 ** (torch.rand(2, VOCAB, generator=generator) * 11 - 8)
    logits = torch.randn(2, VOCAB, generator=generator) * magnitudes
    rows = rows_of([WIDE_FILTERS["large top_k"], SamplingParams(top_k=1700, temperature=1e4)])
    assert run(logits, rows).ids == on_cpu(logits, rows)


def test_narrow_logits_are_searched_by_their_own_bits() -> None:
    logits = (torch.arange(VOCAB).flip(0) / 512).half()[None].repeat(2, 1)
    logits += (torch.arange(VOCAB) % 2 * -20).half()
    rows = rows_of([WIDE_FILTERS["flat top_p"], FILTERS["top_k 20"]])
    kept = run(logits, rows).ids
    assert logits[0, kept[0]] > -4.5
    assert logits[1, kept[1]] >= logits[1].sort(descending=True).values[19]


@pytest.mark.parametrize("vocab_size", [10, 700, CHUNK])
def test_small_vocabularies_are_filtered_as_well(vocab_size: int) -> None:
    logits = logits_of(3, vocab_size)
    params = [SamplingParams(top_k=5), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
    rows = rows_of(params)
    assert run(logits, rows).ids == on_cpu(logits, rows)


def test_among_equal_logits_the_lowest_ids_are_kept() -> None:
    logits = torch.zeros(1, VOCAB)
    seen = {
        run(logits, [SamplingRow(params=SamplingParams(top_k=3), output_index=index)]).ids[0]
        for index in range(3)
    }
    assert seen <= {0, 1, 2}
    assert len(seen) > 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=3.0, top_k=20, top_p=0.5, min_p=0.01),
        SamplingParams(temperature=2.0, top_p=0.37),
        SamplingParams(temperature=3.0, top_k=1001, top_p=0.83),
        SamplingParams(temperature=1.0, top_k=7),
    ],
)
def test_of_tied_logits_the_lowest_ids_are_kept_at_every_edge(params: SamplingParams) -> None:
    logits = (logits_of(4, 5 * CHUNK - 11) * 2).round() / 2
    rows = rows_of([params] * 4)
    assert run(logits, rows).ids == on_cpu(logits, rows)


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [
        (torch.float32, 10),
        pytest.param(torch.float32, 24, marks=pytest.mark.soak),
        pytest.param(torch.float16, 24, marks=pytest.mark.soak),
    ],
)
def test_filters_of_every_width_give_the_cpus_tokens_where_hundreds_of_logits_are_equal(
    dtype: torch.dtype, num_rows: int
) -> None:
    numbers = random.Random(3)
    params = [
        SamplingParams(
            temperature=numbers.choice((0.5, 1.0, 4.0, 9.0)),
            top_k=numbers.choice((0, 5, 300, 2500)),
            top_p=numbers.choice((1.0, 0.95, 0.5)),
            min_p=numbers.choice((0.0, 0.0, 0.02)),
            seed=seed,
        )
        for seed in range(num_rows)
    ]
    # Of a bfloat16 of these sizes 8 bits are left: 0.03 apart.
    logits = logits_of(num_rows, 3 * CHUNK + 5).bfloat16().to(dtype)
    rows = rows_of(params)
    assert run(logits, rows).ids == on_cpu(logits, rows)


def test_a_flat_top_p_keeps_its_share_of_equal_logits() -> None:
    params = SamplingParams(top_p=0.25)
    seen = [
        run(torch.zeros(1, VOCAB), [SamplingRow(params=params, output_index=index)]).ids[0]
        for index in range(2)
    ]
    assert max(seen) <= VOCAB // 4
    assert max(seen) > VOCAB // 20


def test_rows_of_all_kinds_share_a_batch() -> None:
    params = [GREEDY, FILTERS["top_k 20"], SamplingParams(seed=4), WIDE_FILTERS["flat top_p"]]
    logits = logits_of(5)
    rows = rows_of([*params, GREEDY])
    out = run(logits, rows)
    assert out.ids == on_cpu(logits, rows)
    assert out.output_indices == [1, 4, 7, 10, 13]
    alone = [run(logits[index : index + 1], [row]) for index, row in enumerate(rows)]
    assert [one.ids[0] for one in alone] == out.ids
    assert torch.cat([one.logprobs for one in alone]).equal(out.logprobs)


def test_output_indices_count_up_so_that_the_next_draw_is_another() -> None:
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(seed=9)
    rows = DeviceSampling(1, VOCAB, logits.device)
    rows.write({0: SamplingRow(params=params, output_index=5)})
    drawn = []
    for _ in range(3):
        out = torch.empty(1, dtype=torch.int64)
        sample_rows(logits, rows, out, None)
        drawn.append(int(out))
    expected = [SamplingRow(params=params, output_index=index) for index in (5, 6, 7)]
    assert drawn == [sample(logits[0], row).token_id for row in expected]


def test_the_kind_of_a_batch_is_its_greatest_among_the_rows_in_use() -> None:
    rows = DeviceSampling(4, 100, torch.device("cpu"))
    assert rows.kind_of(4) == RowKind.GREEDY
    rows.write(dict(enumerate(rows_of([GREEDY, SamplingParams(), SamplingParams(top_k=3)]))))
    assert [rows.kind_of(count) for count in range(5)] == [0, 0, 1, 2, 2]
    rows.write({2: SamplingRow(params=SamplingParams(top_k=100), output_index=0)})
    assert rows.kind_of(3) == RowKind.RANDOM
