"""Log-probabilities of every position of a text that is given, from the engine of a GPU.

Letters: M positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdserve.cuda.model import CudaModel
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId, Request, RequestId, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ForcedChunk:
    """What the model expects after each position of a chunk."""

    logprobs: Tensor
    """float64 [M, V], on the device."""
    scores: tuple[float, ...]
    """Log-probability of the token that does follow, as the engine tells its clients."""


def force(runner: CudaRunner, tokens: Sequence[int], *, chunk_tokens: int) -> Iterator[ForcedChunk]:
    """Computes a text in chunks, in blocks from 0 on; the last token is only looked for."""
    size = runner.kv.geometry.block_size
    request = Request(
        request_id=RequestId("forced"),
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(temperature=0.0, prompt_logprobs=0),
    )
    for start in range(0, len(tokens) - 1, chunk_tokens):
        end = min(start + chunk_tokens, len(tokens) - 1)
        part = SequenceSlice(
            request=request,
            start=start,
            token_ids=request.token_ids[start:end],
            block_ids=tuple(BlockId(block) for block in range(-(-end // size))),
            output_index=None,
            prompt_targets=request.token_ids[start + 1 : end + 1],
        )
        with _watched(runner.model) as seen:
            result = runner.run(StepPlan(slices=(part,)))
        yield ForcedChunk(
            logprobs=torch.cat(seen).double().log_softmax(1),
            scores=tuple(one.logprob for one in result.prompt_logprobs[request.request_id]),
        )


def divergence(known: Tensor, made: Tensor) -> Tensor:
    """Returns KL(known || made) of each position, [M], from log-probabilities [M, V]."""
    return (known.exp() * (known - made)).sum(1)


@contextmanager
def _watched(model: CudaModel) -> Iterator[list[Tensor]]:
    """Yields a list of all logits that the model makes meanwhile."""
    seen: list[Tensor] = []
    score = model.score

    def keep(hidden: Tensor) -> Tensor:
        logits = score(hidden)
        # The workspace is overwritten by the next rows.
        seen.append(logits.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "score", keep)
        yield seen
