"""What one engine step computes: plain data between a scheduler and the model runner."""

from dataclasses import dataclass, field

from pdserve.request import BlockId, Request, RequestId, SampledToken, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute some tokens, write their KV, maybe sample.

    The tokens are [start, start + len(token_ids)). `block_ids` is the whole block table so far:
    block i holds tokens [i * block_size, (i + 1) * block_size), and the table covers at least
    `start + len(token_ids)` tokens. KV of tokens before `start` is already there.
    """

    request: Request
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    output_index: int | None
    """Output index of the token to sample after the last one; None for all but the last chunk."""
    output_ids: tuple[int, ...] = ()
    """All output tokens so far, over all attempts; only for a request with penalties."""
    prompt_targets: tuple[int, ...] = ()
    """The prompt tokens that follow the slice's leading tokens, one each: their log-probabilities
    are asked for. Empty unless the request wants them."""

    @property
    def end(self) -> int:
        """Number of tokens whose KV is valid after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All sequences of one step, in the order in which they are computed. Never empty."""

    slices: tuple[SequenceSlice, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """Blocks to copy (source, target) before computing: copy-on-write."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(part.token_ids) for part in self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the runner made of a plan: a token for each sample of each slice that samples."""

    sampled: dict[RequestId, SampledToken]
    """By the id of the sample's own request, see `Request.sample`."""
    prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Of each slice's `prompt_targets`, by the id of the slice's request."""
