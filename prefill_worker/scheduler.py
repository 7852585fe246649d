"""Chooses what a prefill worker computes next, and who holds its KV blocks meanwhile.

    waiting --admitted--> computing --last chunk sampled--> held --release--> (prefix cache)
    cancel from anywhere gives the blocks back.

Blocks for a whole prompt are taken when its computing begins, so that what was begun can end. If
the pool has no room, the head of the queue waits for held hand-offs to be released.
"""

from dataclasses import dataclass

from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.scheduler import (
    SchedulerCounters,
    SchedulerLedger,
    SchedulerLoad,
    SequenceTimes,
    Stage,
)
from pdserve.request import BlockId, FinishReason, Request, RequestId, SampledToken
from pdserve.timeline import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillProgress:
    """What a step did for one sequence."""

    request_id: RequestId
    attempt: int
    num_computed: int
    """Leading tokens whose KV is there, cached ones included."""
    sampled: SampledToken | None
    """The next token, after the last chunk; the sequence is held from then on."""
    output_index: int | None
    """Output index of `sampled`."""
    finish_reason: FinishReason | None
    """Set if `sampled` ends the output: nothing is to be handed off."""


class PrefillScheduler:
    """The queue, the chunks and the blocks of one prefill replica. Engine thread only."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        revision: str,
        clock: Clock,
        *,
        max_waiting: int,
        look_ahead: int,
    ) -> None:
        """Starts idle.

        Args:
            config: budgets and block size.
            num_blocks: KV blocks of the pool.
            revision: model revision; KV of different revisions never mixes.
            clock: time of deadlines and stage times.
            max_waiting: requests in the queue; one more is refused.
            look_ahead: queued requests that ask for their reservation before they are computed.
        """
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Says whether something waits or computes."""
        raise NotImplementedError

    @property
    def num_held(self) -> int:
        """Sequences whose KV waits for its hand-off to end."""
        raise NotImplementedError

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since start."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Queues a request; an older attempt of it is dropped and its blocks are freed.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
            Overloaded: the queue is full.
            TooLong: the pool could never hold it.
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

    def requests_in_window(self) -> tuple[Request, ...]:
        """Names the requests that should ask for their reservation now, each once."""
        raise NotImplementedError

    def plan_step(self) -> StepPlan | None:
        """Plans the next step; None if nothing can be computed."""
        raise NotImplementedError

    def complete_step(self, plan: StepPlan, result: StepResult) -> tuple[PrefillProgress, ...]:
        """Books a step that was run; sequences dropped meanwhile are left out."""
        raise NotImplementedError

    def release(self, request_id: RequestId) -> None:
        """Ends a held sequence: its blocks go to the prefix cache.

        Raises:
            StaleAttempt: it is not held here.
        """
        raise NotImplementedError

    def stage_of(self, request_id: RequestId) -> Stage | None:
        """Returns where a request stands; None if it is not here."""
        raise NotImplementedError

    def requests(self) -> tuple[Request, ...]:
        """Returns all requests here, the oldest first."""
        raise NotImplementedError

    def block_table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Returns the blocks of a request that is computing or held.

        Raises:
            StaleAttempt: it is not here.
        """
        raise NotImplementedError

    def num_cached_tokens(self, request_id: RequestId) -> int:
        """Returns the tokens whose KV came from the prefix cache.

        Raises:
            StaleAttempt: it is not here.
        """
        raise NotImplementedError

    def times(self, request_id: RequestId) -> SequenceTimes:
        """Returns how long a request waited and computed.

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
