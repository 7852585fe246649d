"""What a request is, once every default is filled in; plain data, shared by all pools.

Output tokens are counted by *output index*: the first generated token has index 0, over all
attempts. A request that resumes carries the tokens the client already has behind its prompt, so
`token_ids[num_prompt_tokens:]` are emitted tokens and the next one has index `num_emitted`.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
HandoffId = NewType("HandoffId", str)
WorkerId = NewType("WorkerId", str)
FrontId = NewType("FrontId", str)
Incarnation = NewType("Incarnation", int)
ReservationId = NewType("ReservationId", bytes)
BlockId = NewType("BlockId", int)


class FinishReason(StrEnum):
    """Why a sample ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class Role(StrEnum):
    """The pools a worker can belong to."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Checked and completed at the router."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """In (0, 1]."""
    seed: int = 0
    """64 unsigned bits; the router draws one when the client gives none."""
    max_tokens: int = 16
    """Output tokens over all attempts, at least 1."""
    min_tokens: int = 0
    """EOS and stop ids cannot be sampled before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings; found by the router."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report per token; None reports none, 0 the chosen token alone."""
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    min_p: float = 0.0
    """Keeps tokens at least this likely, as a share of the most likely one; 0 is off."""
    presence_penalty: float = 0.0
    """Taken once off the logit of each token of the output."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time the output has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits of known tokens, multiplies negative ones; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), ordered by id."""
    prompt_logprobs: int | None = None
    """Alternatives to report per prompt token; None reports none, 0 the prompt's token alone."""
    echo: bool = False
    """The router gives the prompt back before the output."""
    n: int = 1
    """Samples of one prompt."""

    @property
    def has_penalties(self) -> bool:
        """Says whether the choice depends on the tokens so far."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to generate, as workers see it."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """Prompt followed by output tokens that were emitted in earlier attempts."""
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    tenant_salt: bytes = b""
    front_id: FrontId = FrontId("")
    handoff_id: HandoffId = HandoffId("")
    attempt: int = 1
    deadline_s: float | None = None
    """Time budget left when the request arrived here."""
    is_priority: bool = False
    sample_index: int = 0
    """Index of the first of `sampling.n` samples."""

    @property
    def num_emitted(self) -> int:
        """Output tokens known before this attempt; also the output index of the next token."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end the sequence."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *self.sampling.stop_token_ids))

    @property
    def sample_indices(self) -> range:
        """The samples this request is for."""
        return range(self.sample_index, self.sample_index + self.sampling.n)

    def sample(self, index: int) -> "Request":
        """Returns one of the samples as a request of its own; the only one is the request itself.

        Samples share prompt, attempt and limits. Their ids and hand-off ids end in `#` and the
        index, which no client's id can.
        """
        if self.sampling.n == 1:
            assert index == self.sample_index
            return self
        assert index in self.sample_indices
        return replace(
            self,
            request_id=RequestId(f"{self.request_id}#{index}"),
            handoff_id=HandoffId(f"{self.handoff_id}#{index}"),
            sampling=replace(self.sampling, n=1),
            sample_index=index,
        )

    def samples(self) -> "tuple[Request, ...]":
        """Returns all samples as requests of their own."""
        if self.sampling.n == 1:
            return (self,)
        return tuple(self.sample(index) for index in self.sample_indices)


def group_id_of(request_id: RequestId) -> RequestId | None:
    """Returns the request that a sample's id belongs to; None for a request's own id."""
    group, mark, _ = request_id.rpartition("#")
    return RequestId(group) if mark else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """The log-probability of a chosen token and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """One generated token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def finish_reason_after(
    request: Request, num_output_tokens: int, token_id: int
) -> FinishReason | None:
    """Says whether the output ends with `token_id`, its `num_output_tokens`-th token; None goes on.

    Stop strings are the router's to find: they need text.
    """
    sampling = request.sampling
    # As in `stop_ids`, without making a set for every token.
    is_stop = token_id in sampling.stop_token_ids or (
        not sampling.ignore_eos and token_id in request.eos_token_ids
    )
    if is_stop and num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
