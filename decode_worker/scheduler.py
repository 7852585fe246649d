"""Chooses what a decode worker computes next, and who holds its KV blocks meanwhile.

    reserve -> reserved --start (KV has landed)--> running --finished--> (prefix cache)
    submit_local -> waiting --admitted--> computing --first token--> running
    cancel, or letting go of the youngest when blocks run out, from anywhere.

Running sequences come first in a step, the oldest first of all. When one of them needs a block
and none is left, the youngest by arrival is let go: a running or computing one goes back to the
router, a reservation back to its prefill worker. The oldest goes only when it is alone, which
cannot be, since what exceeds the pool alone was refused; so each step takes some sequence on.
"""

from dataclasses import dataclass

from decode_worker.admission import Grant, Refusal
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.scheduler import SchedulerCounters, SchedulerLedger, SchedulerLoad, Stage
from pdserve.request import BlockId, FinishReason, Request, RequestId, SampledToken
from pdserve.timeline import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeProgress:
    """One token that a step made."""

    request_id: RequestId
    attempt: int
    token: SampledToken
    output_index: int
    finish_reason: FinishReason | None
    """Set with the last token; the blocks are freed by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LetGo:
    """A healthy sequence that this worker gave up; its blocks are freed."""

    request: Request
    stage: Stage
    """`reserved`: the prefill worker still has the KV and needs another place for it. Any other:
    the router continues it as its next attempt."""
    next_index: int
    """First output index that was not made here."""


class DecodeScheduler:
    """The batch, the reservations and the blocks of one decode replica. Engine thread only."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        revision: str,
        clock: Clock,
        *,
        max_waiting: int,
        max_local_prefill_tokens: int | None,
    ) -> None:
        """Starts idle.

        Args:
            config: budgets and block size.
            num_blocks: KV blocks of the pool.
            revision: model revision; KV of different revisions never mixes.
            clock: time of deadlines and retry hints.
            max_waiting: requests that wait to be prefilled here; one more is refused.
            max_local_prefill_tokens: prompt tokens computed here for one request; None: any.
        """
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Says whether something waits, computes or runs."""
        raise NotImplementedError

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since start; `prompt_tokens` are those this worker computed itself."""
        raise NotImplementedError

    def reserve(self, request: Request) -> Grant | Refusal:
        """Takes all blocks that a sequence needs to start, or none.

        An older attempt of the request is dropped first.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
        """
        raise NotImplementedError

    def release_reservation(self, request_id: RequestId, attempt: int) -> bool:
        """Gives a reservation's blocks back; False if there is none (it may be repeated)."""
        raise NotImplementedError

    def start(self, request_id: RequestId, attempt: int, first_token: int) -> None:
        """Lets a reserved sequence run: KV of all its tokens has landed in its blocks.

        Args:
            request_id: the request.
            attempt: its attempt.
            first_token: sampled on prefill; its output index is the request's `num_emitted`.

        Raises:
            StaleAttempt: it is not reserved here (any more).
        """
        raise NotImplementedError

    def submit_local(self, request: Request) -> None:
        """Queues a request that is prefilled here; an older attempt of it is dropped first.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
            Overloaded: the queue is full.
            TooLong: the pool could never hold it.
            LocalPrefillRefused: more prompt tokens are to compute than is allowed.
        """
        raise NotImplementedError

    def cancel(self, request_id: RequestId, attempt: int | None = None) -> bool:
        """Drops a request at any stage and frees its blocks.

        Args:
            request_id: the request.
            attempt: drops this attempt and older ones; None drops any.

        Returns:
            Whether there was something to drop.
        """
        raise NotImplementedError

    def plan_step(self) -> StepPlan | None:
        """Plans the next step; None if nothing can be computed. May let sequences go."""
        raise NotImplementedError

    def complete_step(self, plan: StepPlan, result: StepResult) -> tuple[DecodeProgress, ...]:
        """Books a step that was run; sequences dropped meanwhile are left out."""
        raise NotImplementedError

    def take_let_go(self) -> tuple[LetGo, ...]:
        """Names, once, the sequences given up since the last call: ask after each plan."""
        raise NotImplementedError

    def drain(self) -> tuple[LetGo, ...]:
        """Gives up everything, reservations too."""
        raise NotImplementedError

    def stage_of(self, request_id: RequestId) -> Stage | None:
        """Returns where a request stands; None if it is not here."""
        raise NotImplementedError

    def requests(self) -> tuple[Request, ...]:
        """Returns all requests here, the oldest first."""
        raise NotImplementedError

    def block_table(self, request_id: RequestId, attempt: int) -> tuple[BlockId, ...]:
        """Returns the blocks of a sequence.

        Raises:
            StaleAttempt: this attempt is not here (any more).
        """
        raise NotImplementedError

    def num_cached_tokens(self, request_id: RequestId) -> int:
        """Returns the tokens whose KV came from the prefix cache.

        Raises:
            StaleAttempt: it is not here.
        """
        raise NotImplementedError

    def num_recomputed_tokens(self, request_id: RequestId) -> int:
        """Returns the tokens of the request that this worker computed itself.

        Raises:
            StaleAttempt: it is not here.
        """
        raise NotImplementedError

    def expired(self, now_s: float) -> tuple[RequestId, ...]:
        """Names the requests whose deadline has passed; the caller cancels them."""
        raise NotImplementedError

    def load(self) -> SchedulerLoad:
        """Returns how busy the worker is."""
        raise NotImplementedError

    def ledger(self) -> SchedulerLedger:
        """Returns what is held."""
        raise NotImplementedError
