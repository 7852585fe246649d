"""What a request is, once every default is filled in; plain data, shared by all pools.

Output tokens are counted by *output index*: the first generated token has index 0, over all
attempts. A request that resumes carries the tokens the client already has behind its prompt, so
`token_ids[num_prompt_tokens:]` are emitted tokens and the next one has index `num_emitted`.
"""

from dataclasses import dataclass, field
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

    @property
    def num_emitted(self) -> int:
        """Output tokens known before this attempt; also the output index of the next token."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end the sequence."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *self.sampling.stop_token_ids))


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
