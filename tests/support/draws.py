"""Tokens drawn from made-up logits."""

import torch

from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, sample

GREEDY = SamplingParams(temperature=0.0)


def logits_of(vocab_size: int = 200, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator) * scale


def draw(
    logits: torch.Tensor,
    params: SamplingParams,
    output_index: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    sample_index: int = 0,
) -> int:
    row = SamplingRow(
        params=params, output_index=output_index, stop_ids=stop_ids, sample_index=sample_index
    )
    return sample(logits, row).token_id


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return [draw(logits, params, output_index) for output_index in range(count)]
