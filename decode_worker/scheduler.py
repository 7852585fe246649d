"""Chooses what a decode worker computes next, and who holds its KV blocks meanwhile.

    reserve -> reserved --start (KV has landed)--> running --finished--> (prefix cache)
    submit_local -> waiting --admitted--> computing --first token--> running
    cancel, or letting go of the youngest when blocks run out, from anywhere.

Running sequences come first in a step, the oldest first of all. When one of them needs a block
and none is left, the youngest by arrival is let go: a running or computing one goes back to the
router, a reservation back to its prefill worker. The oldest goes only when it is alone, which
cannot be, since what exceeds the pool alone was refused; so each step takes some sequence on.

A step may be planned while others are in flight: see `planner`.
"""

from collections.abc import Mapping
from dataclasses import replace

from decode_worker.admission import Grant, Refusal, RefusalReason, StepPace
from decode_worker.occupancy import LetGo, Occupancy
from decode_worker.planner import StepPlanner
from decode_worker.progress import DecodeProgress, make_progress, make_sample_progress
from decode_worker.skipping import StepSkipper
from pdserve.cache.cached_granules import CachedGranules
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import ONE_STAGE, Lookahead, SequenceSlice, StepPlan, StepResult
from pdserve.engine.scheduler import (
    ChainMaker,
    SchedulerCounters,
    SchedulerLedger,
    SchedulerLoad,
    SequenceState,
    Stage,
    hash_request,
)
from pdserve.errors import InvalidField, LocalPrefillRefused, TooLong
from pdserve.request import (
    BlockId,
    Request,
    RequestId,
    finish_reason_after,
)
from pdserve.timeline import Clock


class DecodeScheduler:
    """The batch, the reservations and the blocks of one decode replica. Engine thread only."""

    def __init__(  # noqa: PLR0913 - where the parts meet
        self,
        config: EngineConfig,
        num_blocks: int,
        revision: str,
        clock: Clock,
        *,
        max_waiting: int,
        max_local_prefill_tokens: int | None,
        lookahead: Lookahead = ONE_STAGE,
        make_chain: ChainMaker = hash_request,
    ) -> None:
        """Starts idle.

        Args:
            config: budgets and block size.
            num_blocks: KV blocks of the pool.
            revision: model revision; KV of different revisions never mixes.
            clock: time of deadlines and retry hints.
            max_waiting: requests that wait to be prefilled here; one more is refused.
            max_local_prefill_tokens: prompt tokens computed here for one request; None: any.
            lookahead: what may be planned while steps are in flight.
            make_chain: names the blocks of a request; a simulator has a cheaper way.
        """
        self._config = config
        self._clock = clock
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._occupancy = Occupancy(
            config, num_blocks, revision, max_waiting=max_waiting, make_chain=make_chain
        )
        self._planner = StepPlanner(config, self._occupancy, clock, lookahead)
        self._pace = StepPace(clock)
        self.skipper = StepSkipper(config, self._occupancy, self._pace, lookahead.num_stages)
        """Books steps at once, for simulators."""

    def tell_cached(self, granules: CachedGranules) -> None:
        """Tells from now on what is cached here; nothing is yet."""
        self._occupancy.cache.tell(granules)

    @property
    def has_work(self) -> bool:
        """Says whether a step is in flight or the next plan computes something.

        Reservations are no work, nor is a queue whose head waits for them.
        """
        occupancy = self._occupancy
        if occupancy.flights or occupancy.computing or occupancy.running:
            return True
        head = occupancy.lanes.head()
        return head is not None and occupancy.has_room(
            occupancy.find_for_computing(head.request, head.chain), occupancy.need(head.request)
        )

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since start; `prompt_tokens` are those this worker computed itself."""
        return replace(
            self._occupancy.counters,
            stale_refused=self._occupancy.roster.num_stale_refused,
        )

    def reserve(self, request: Request) -> Grant | Refusal:
        """Takes all blocks that a sequence needs to start, or none.

        An older attempt of the request is dropped first.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
        """
        occupancy = self._occupancy
        older = occupancy.roster.older_attempt(request)
        if older is not None:
            occupancy.drop(older)
        need, pool = occupancy.need(request), occupancy.cache.pool
        if need.num_final_blocks > pool.num_blocks:
            return Refusal(
                reason=RefusalReason.TOO_LARGE,
                detail=f"needs {need.num_final_blocks} blocks of {pool.num_blocks}",
                retry_after_s=None,
            )
        chain = occupancy.chain(request)
        hit = occupancy.find_for_landing(chain)
        if not occupancy.has_room(hit, need, occupancy.num_claimed_by_head()):
            num_new = need.num_table_blocks - len(hit.block_ids)
            return Refusal(
                reason=RefusalReason.NO_ROOM,
                detail=f"needs {num_new} new blocks, {pool.num_available} are available",
                retry_after_s=self._retry_hint_s(),
            )
        sequence = occupancy.roster.add(request, chain, Stage.RESERVED, self._clock.now())
        occupancy.open(sequence, hit, need)
        return Grant(
            request_id=request.request_id,
            attempt=request.attempt,
            block_ids=tuple(sequence.table.block_ids),
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def release_reservation(self, request_id: RequestId, attempt: int) -> bool:
        """Gives a reservation's blocks back; False if there is none (it may be repeated)."""
        sequence = self._occupancy.roster.find(request_id)
        if sequence is None or sequence.request.attempt != attempt:
            return False
        if sequence.stage is not Stage.RESERVED:
            return False
        self._occupancy.drop(sequence)
        return True

    def start(
        self, request_id: RequestId, attempt: int, first_tokens: Mapping[int, int]
    ) -> tuple[Request, ...]:
        """Lets a reserved sequence run: KV of all its tokens has landed in its blocks.

        Args:
            request_id: the request.
            attempt: its attempt.
            first_tokens: by sample index, for samples that go on; all have the same output index.

        Returns:
            The samples that run now.

        Raises:
            StaleAttempt: it is not reserved here (any more).
        """
        occupancy = self._occupancy
        sequence = occupancy.roster.require(request_id, attempt, Stage.RESERVED)
        request = sequence.request
        count = request.num_emitted + 1
        if any(finish_reason_after(request, count, token) for token in first_tokens.values()):
            raise InvalidField("first_tokens", first_tokens, "tokens that do not end the output")
        if not first_tokens or not first_tokens.keys() <= set(request.sample_indices):
            raise InvalidField("first_tokens", sorted(first_tokens), "samples of the request")
        sequence.num_computed = len(request.token_ids)
        occupancy.cache.enter(sequence.table, sequence.chain, sequence.num_computed)
        return occupancy.go_on(sequence, first_tokens)

    def submit_local(
        self,
        request: Request,
        max_prefill_tokens: int | None = None,
        *,
        has_lost_handoff: bool = False,
    ) -> None:
        """Queues a request that is prefilled here; an older attempt of it is dropped first.

        Args:
            request: the request.
            max_prefill_tokens: most uncached tokens to compute, besides this worker's own limit.
            has_lost_handoff: nobody chose to prefill here: its tokens count as recomputed.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
            Overloaded: the queue is full.
            TooLong: the pool could never hold it.
            LocalPrefillRefused: more prompt tokens are to compute than is allowed.
        """
        occupancy = self._occupancy
        older = occupancy.roster.older_attempt(request)
        num_tokens = len(request.token_ids)
        if num_tokens == 0:
            raise InvalidField("token_ids", num_tokens, "at least one token")
        num_blocks = occupancy.cache.pool.num_blocks
        if occupancy.need(request).num_final_blocks > num_blocks:
            raise TooLong(
                "prompt plus max_tokens",
                request.num_prompt_tokens + request.sampling.max_tokens,
                f"at most {num_blocks * self._config.block_size + 1}, this worker's KV cache",
            )
        if older is not None:
            occupancy.drop(older)
        occupancy.lanes.require_room()
        chain = occupancy.chain(request)
        hit = occupancy.find_for_computing(request, chain)
        num_to_compute = num_tokens - occupancy.num_hit_tokens(hit)
        limits = (max_prefill_tokens, self._max_local_prefill_tokens)
        limit = min((one for one in limits if one is not None), default=None)
        if limit is not None and num_to_compute > limit:
            raise LocalPrefillRefused(
                f"{num_to_compute} prompt tokens to compute, this worker may compute {limit} "
                "by itself (local prefill)"
            )
        sequence = occupancy.roster.add(request, chain, Stage.WAITING, self._clock.now())
        sequence.max_computed_here = limit
        sequence.has_lost_handoff = has_lost_handoff
        occupancy.lanes.push(sequence)

    def cancel(self, request_id: RequestId, attempt: int | None = None) -> bool:
        """Drops a request at any stage and frees its blocks.

        Args:
            request_id: the request.
            attempt: drops this attempt and older ones; None drops any.

        Returns:
            Whether there was something to drop.
        """
        sequence = self._occupancy.roster.find(request_id)
        if sequence is None or (attempt is not None and sequence.request.attempt > attempt):
            return False
        self._occupancy.drop(sequence)
        return True

    def plan_step(self) -> StepPlan | None:
        """Plans the next step, which the caller launches; None if nothing can be computed.

        Others may be in flight: they are not waited for by sequences whose next token the device
        chooses; they are planned one token further. May let sequences go, if none is in flight.
        """
        step = self._planner.plan()
        if step is None:
            return None
        self._pace.begin_step()
        self._occupancy.flights.begin(step.plan, step.sequences)
        return step.plan

    def live_slices(self, plan: StepPlan) -> tuple[SequenceSlice, ...]:
        """Returns the slices of a step in flight whose sequences were not dropped since."""
        return self._occupancy.flights.live_slices(plan)

    def complete_step(self, plan: StepPlan, result: StepResult) -> tuple[DecodeProgress, ...]:
        """Books the oldest step in flight; sequences dropped meanwhile are left out.

        What ends here may be in the next flight: its slice there is ignored.
        """
        self._pace.end_step()
        occupancy = self._occupancy
        # Landed prompts, whose first step here is launched by now.
        occupancy.cache.settle()
        progress: list[DecodeProgress] = []
        for part, sequence in occupancy.flights.land(plan):
            if part.start < len(part.request.token_ids):
                self._book_prompt(part, sequence)
            occupancy.cache.enter(sequence.table, sequence.chain, part.end)
            if part.output_index is None:
                continue
            if sequence.stage is Stage.COMPUTING:
                sequence.sampled_s = self._clock.now()
            if part.request.sampling.n == 1:
                progress.append(self._book_token(sequence, part.output_index, result))
            else:
                progress += self._book_tokens(sequence, part.output_index, result)
        occupancy.counters.generation_tokens += len(progress)
        return tuple(progress)

    def _book_token(
        self, sequence: SequenceState, output_index: int, result: StepResult
    ) -> DecodeProgress:
        """Books the next token of a sequence of one sample, which goes on or ends."""
        request = sequence.request
        token = result.sampled[request.request_id]
        entry = make_sample_progress(sequence, request, output_index, token, sequence.times)
        if entry.finish_reason is None:
            self._occupancy.run(sequence, token.token_id)
        else:
            self._occupancy.drop(sequence)
        return entry

    def _book_tokens(
        self, sequence: SequenceState, output_index: int, result: StepResult
    ) -> tuple[DecodeProgress, ...]:
        """Books the first token of each of several samples; those that go on part and run."""
        progress = make_progress(sequence, output_index, result)
        tokens = {
            index: entry.token.token_id
            for index, entry in zip(sequence.request.sample_indices, progress, strict=True)
            if entry.finish_reason is None
        }
        self._occupancy.go_on(sequence, tokens)
        return progress

    def _book_prompt(self, part: SequenceSlice, sequence: SequenceState) -> None:
        num_prompt = min(part.end, len(part.request.token_ids)) - part.start
        counters = self._occupancy.counters
        counters.prompt_tokens += num_prompt
        if sequence.has_lost_handoff:
            counters.recomputed_tokens += num_prompt
        sequence.num_computed_here += num_prompt

    def take_let_go(self) -> tuple[LetGo, ...]:
        """Names, once, what was given up since the last call: ask after each plan."""
        return self._occupancy.take_let_go()

    def drain(self) -> tuple[LetGo, ...]:
        """Gives up everything, reservations too."""
        for sequence in self._occupancy.roster:
            self._occupancy.give_up(sequence)
        return self._occupancy.take_let_go()

    def find(self, request_id: RequestId) -> Request | None:
        """Returns the live attempt of a request."""
        sequence = self._occupancy.roster.find(request_id)
        return None if sequence is None else sequence.request

    def stage_of(self, request_id: RequestId) -> Stage | None:
        """Returns where a request stands; None if it is not here."""
        sequence = self._occupancy.roster.find(request_id)
        return None if sequence is None else sequence.stage

    def requests(self) -> tuple[Request, ...]:
        """Returns all requests here, the oldest first."""
        return tuple(sequence.request for sequence in self._occupancy.roster)

    def block_table(self, request_id: RequestId, attempt: int) -> tuple[BlockId, ...]:
        """Returns the blocks of a sequence.

        Raises:
            StaleAttempt: this attempt is not here (any more).
        """
        return tuple(self._occupancy.roster.require(request_id, attempt).table.block_ids)

    def expired(self, now_s: float) -> tuple[RequestId, ...]:
        """Names the requests whose deadline has passed; the caller cancels them."""
        return self._occupancy.roster.expired(now_s)

    def load(self) -> SchedulerLoad:
        """Returns how busy the worker is."""
        return self._occupancy.load()

    def ledger(self) -> SchedulerLedger:
        """Returns what is held."""
        return self._occupancy.ledger()

    def check(self) -> None:
        """Asserts that pool, cache and tables agree."""
        self._occupancy.check()

    def _retry_hint_s(self) -> float:
        remaining = (
            sequence.request.sampling.max_tokens - sequence.num_output_tokens
            for sequence in self._occupancy.running
        )
        return self._pace.retry_hint_s(remaining)
