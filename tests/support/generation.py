"""A loop over step plans, for tests that need a model but no scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.engine.forward_batch import build_batch
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of
from pdserve.models.llama import LlamaModel
from pdserve.request import BlockId, Request, RequestId, SampledToken, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)


def make_runner(model: LlamaModel, engine: EngineConfig, num_blocks: int = 64) -> ModelRunner:
    """Puts a model over new KV memory."""
    kv = KvTensors(geometry_of(model.config, engine), num_blocks)
    return ModelRunner(model, kv)


def make_request(
    token_ids: Sequence[int],
    num_emitted: int = 0,
    request_id: str = "r",
    sampling: SamplingParams = GREEDY,
    eos_token_ids: tuple[int, ...] = (),
) -> Request:
    """Makes a request whose last `num_emitted` tokens are output tokens."""
    return Request(
        request_id=RequestId(request_id),
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids) - num_emitted,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
    )


def make_slice(
    request: Request, tokens: Sequence[int], start: int, end: int, blocks: Sequence[int]
) -> SequenceSlice:
    """Makes the slice [start, end) of a sequence; it samples if it reaches the last token."""
    is_last = end == len(tokens)
    return SequenceSlice(
        request=request,
        start=start,
        token_ids=tuple(tokens[start:end]),
        block_ids=tuple(BlockId(block) for block in blocks),
        output_index=end - request.num_prompt_tokens if is_last else None,
    )


def run_slices(runner: ModelRunner, *slices: SequenceSlice) -> dict[RequestId, SampledToken]:
    """Runs one step."""
    return runner.run(StepPlan(slices=slices)).sampled


def compute_logits(runner: ModelRunner, *slices: SequenceSlice) -> Tensor:
    """Runs one step without sampling and returns logits, one row per sampling slice."""
    batch = build_batch(StepPlan(slices=slices), runner.kv.geometry.block_size)
    return runner.model.forward(batch, runner.kv).wait()


def compute_in_chunks(
    runner: ModelRunner,
    request: Request,
    blocks: Sequence[int],
    ends: Sequence[int],
    start: int = 0,
) -> Tensor:
    """Computes a request's tokens from `start` in chunks with these ends; returns the logits."""
    tokens = request.token_ids
    for end in ends:
        logits = compute_logits(runner, make_slice(request, tokens, start, end, blocks))
        start = end
    return logits[0]


def generate(
    runner: ModelRunner,
    request: Request,
    num_tokens: int,
    blocks: Sequence[int],
    chunk_tokens: int = 256,
) -> list[int]:
    """Computes a request alone, in chunks, and returns its output tokens of this attempt."""
    tokens = list(request.token_ids)
    num_known = len(tokens)
    computed = 0
    while len(tokens) < num_known + num_tokens:
        end = min(computed + chunk_tokens, len(tokens))
        sampled = run_slices(runner, make_slice(request, tokens, computed, end, blocks))
        computed = end
        if sampled:
            tokens.append(sampled[request.request_id].token_id)
    return tokens[num_known:]


@dataclass
class BatchMember:
    """A request of `generate_together` and how far it is."""

    request: Request
    blocks: Sequence[int]
    tokens: list[int]
    computed: int = 0


def generate_together(
    runner: ModelRunner, members: Sequence[tuple[Request, Sequence[int]]], num_tokens: int
) -> list[list[int]]:
    """Computes requests in one batch: each step holds one slice of every unfinished request."""
    batch = [
        BatchMember(
            replace(request, request_id=RequestId(str(index))), blocks, list(request.token_ids)
        )
        for index, (request, blocks) in enumerate(members)
    ]
    while True:
        unfinished = [
            member
            for member in batch
            if len(member.tokens) < len(member.request.token_ids) + num_tokens
        ]
        if not unfinished:
            return [member.tokens[len(member.request.token_ids) :] for member in batch]
        slices = [
            make_slice(
                member.request, member.tokens, member.computed, len(member.tokens), member.blocks
            )
            for member in unfinished
        ]
        sampled = run_slices(runner, *slices)
        for member in unfinished:
            member.computed = len(member.tokens)
            member.tokens.append(sampled[member.request.request_id].token_id)
