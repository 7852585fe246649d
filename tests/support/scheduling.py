"""Requests, and a runner whose KV is made of numbers, so that schedulers are tested without torch.

The KV of a token is a digest of the whole history up to it, made of the digest that is found in
the slot before: a block that was lost, shared or overwritten by mistake changes every later token.
"""

from dataclasses import dataclass, field

from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.request import (
    BlockId,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    finish_reason_after,
)

VOCABULARY = 50_000


def make_config(
    *,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    enable_prefix_caching: bool = True,
) -> EngineConfig:
    return EngineConfig(
        model="fake",
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )


def make_request(
    name: str,
    prompt: tuple[int, ...] | int,
    *,
    max_tokens: int = 8,
    emitted: tuple[int, ...] = (),
    attempt: int = 1,
    is_priority: bool = False,
    deadline_s: float | None = None,
    salt: bytes = b"",
    stop_token_ids: tuple[int, ...] = (),
    n: int = 1,
) -> Request:
    """A prompt given by its length is like no other request's."""
    if isinstance(prompt, int):
        prompt = tuple(abs(hash((i, *name.encode()))) % VOCABULARY for i in range(prompt))
    return Request(
        request_id=RequestId(name),
        token_ids=prompt + emitted,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, n=n),
        attempt=attempt,
        is_priority=is_priority,
        deadline_s=deadline_s,
        tenant_salt=salt,
    )


def continue_request(request: Request, emitted: tuple[int, ...]) -> Request:
    """The next attempt, as the router makes it of all tokens its client has."""
    return Request(
        request_id=request.request_id,
        token_ids=request.token_ids[: request.num_prompt_tokens] + emitted,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        attempt=request.attempt + 1,
        is_priority=True,
        tenant_salt=request.tenant_salt,
        sample_index=request.sample_index,
    )


def expected_output(request: Request) -> tuple[int, ...]:
    """What a request gives when it is alone."""
    digest = 0
    for token in request.token_ids[: request.num_prompt_tokens]:
        digest = digest_of(digest, token)
    output: list[int] = []
    while True:
        token = sample_of(digest, len(output), request.sample_index)
        output.append(token)
        if finish_reason_after(request, len(output), token) is not None:
            return tuple(output)
        digest = digest_of(digest, token)


@dataclass
class FakeRunner:
    """Computes plans over numbers; blocks start, and stay, full of rubbish until written."""

    block_size: int
    slots: dict[tuple[BlockId, int], int] = field(default_factory=dict)
    num_steps: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        sampled: dict[RequestId, SampledToken] = {}
        written: set[tuple[BlockId, int]] = set()
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.slots[target, offset] = self.slots.get((source, offset), -7)
        for part in plan.slices:
            assert part.token_ids, "a slice is never empty"
            assert len(part.block_ids) * self.block_size >= part.end
            for position, token in enumerate(part.token_ids, part.start):
                slot = self._slot(part.block_ids, position)
                assert slot not in written, "two slices write one slot"
                written.add(slot)
                self.slots[slot] = digest_of(self._read(part.block_ids, position - 1), token)
            if part.output_index is not None:
                digest = self._read(part.block_ids, part.end - 1)
                for one in part.request.samples():
                    sampled[one.request_id] = SampledToken(
                        token_id=sample_of(digest, part.output_index, one.sample_index)
                    )
        self.num_steps += 1
        return StepResult(sampled=sampled)

    def receive(
        self,
        source: "FakeRunner",
        source_blocks: tuple[BlockId, ...],
        blocks: tuple[BlockId, ...],
        token_range: range,
    ) -> None:
        """Copies the KV of some tokens out of another runner's blocks."""
        for position in token_range:
            self.slots[self._slot(blocks, position)] = source._read(source_blocks, position)

    def _slot(self, blocks: tuple[BlockId, ...], position: int) -> tuple[BlockId, int]:
        return blocks[position // self.block_size], position % self.block_size

    def _read(self, blocks: tuple[BlockId, ...], position: int) -> int:
        return self.slots.get(self._slot(blocks, position), -7) if position >= 0 else 0


def digest_of(digest: int, token: int) -> int:
    return hash((digest, token))


def sample_of(digest: int, output_index: int, sample_index: int) -> int:
    return hash((digest, output_index, sample_index, 1)) % VOCABULARY
