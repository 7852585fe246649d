"""What one engine step computes: plain data between a scheduler and the model runner."""

from dataclasses import dataclass, field
from typing import Protocol

from pdserve.request import BlockId, Request, RequestId, SampledToken, TokenLogprobs


@dataclass(kw_only=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute some tokens, write their KV, maybe sample.

    Never changed, yet not frozen: that would make it three times as slow to make (2.1 us instead
    of 0.7, CPython 3.11), and there is one for each sequence in each step.

    The tokens are [start, end). `block_ids` is the whole block table so far: block i holds tokens
    [i * block_size, (i + 1) * block_size), and the table covers at least `end` tokens. KV of
    tokens before `start` is there once all steps launched before this one have ended.
    """

    request: Request
    start: int
    token_ids: tuple[int, ...]
    """The tokens to compute; without the last one if the slice awaits it."""
    block_ids: tuple[BlockId, ...]
    """The very same tuple as in the sequence's slice before, for as long as its table is the same:
    a runner may tell by identity that nothing changed."""
    output_index: int | None
    """Output index of the token to sample after the last one; None for all but the last chunk."""
    output_ids: tuple[int, ...] = ()
    """All output tokens so far, over all attempts; only for a request with penalties."""
    prompt_targets: tuple[int, ...] = ()
    """The prompt tokens that follow the slice's leading tokens, one each: their log-probabilities
    are asked for. Empty unless the request wants them."""
    awaits_token: bool = False
    """The slice's last token is the one that the newest step in flight with the same request
    samples for it: the host does not know it yet. Start, end, block table and output index are as
    if it did."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed, the awaited one included."""
        return len(self.token_ids) + self.awaits_token

    @property
    def end(self) -> int:
        """Number of tokens whose KV is valid after the step."""
        return self.start + len(self.token_ids) + self.awaits_token

    @property
    def is_awaitable(self) -> bool:
        """Says whether a later step may await this slice's token: it is chosen on the device."""
        return not self.prompt_targets and is_chosen_on_device(self.request)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All sequences of one step, in the order in which they are computed. Never empty."""

    slices: tuple[SequenceSlice, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """Blocks to copy (source, target) before computing: copy-on-write."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(part.num_tokens for part in self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the runner made of a plan: a token for each sample of each slice that samples."""

    sampled: dict[RequestId, SampledToken]
    """By the id of the sample's own request, see `Request.sample`."""
    prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Of each slice's `prompt_targets`, by the id of the slice's request."""


class PendingStep(Protocol):
    """A step that was launched."""

    def is_over(self) -> bool:
        """Says whether `result` would return at once."""
        ...

    def wait(self) -> None:
        """Waits until `is_over`; callable from any thread, beside the one that launches."""
        ...

    def result(self) -> StepResult:
        """Waits for the step's end; called once, in the order of the launches."""
        ...


class StepRunner(Protocol):
    """Computes steps in the order in which they are launched. Used by one thread.

    The blocks of a plan, and the sources of its copies, belong to their sequences until the result
    was taken: nobody frees or fills them before. So a runner needs no fence between flying steps
    and frames that land; only steps launched after a frame has landed must see it.
    """

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be launched before the result of the first of them is taken.

        As many as there are pipeline stages, which then never are given a slice that awaits a
        token; or one more, where tokens are fed on the device.
        """
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step; must not wait for one that is in flight.

        Raises:
            ValueError: a slice is empty, or names tokens or blocks out of range.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookahead:
    """What may be planned while steps are in flight."""

    num_stages: int = 1
    """Stages of the pipeline. Each computes another step, so running sequences are split into as
    many steps of their own."""
    feeds_tokens: bool = True
    """A slice may await a token; else a sequence that samples is in one step at a time."""


ONE_STAGE = Lookahead()


def lookahead_of(runner: StepRunner, num_stages: int) -> Lookahead:
    """Returns what the runner of a pipeline of so many stages allows."""
    return Lookahead(num_stages=num_stages, feeds_tokens=runner.max_steps_in_flight > num_stages)


def is_chosen_on_device(request: Request) -> bool:
    """Says whether a request's tokens are chosen without the host.

    Other choices need the host: penalties count its output, and biases, alternatives and several
    samples of one row are rare enough to be made there from the row's logits. So are stop ids that
    must wait while log-probabilities count them in.
    """
    sampling = request.sampling
    return not (
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.logprobs
        or sampling.n > 1
        or (sampling.logprobs is not None and sampling.min_tokens)
    )
