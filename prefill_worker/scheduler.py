"""Chooses what a prefill worker computes next, and who holds its KV blocks meanwhile.

    waiting --admitted--> computing --last chunk sampled--> held --release--> (prefix cache)
    cancel from anywhere gives the blocks back.

Blocks for a whole prompt are taken when its computing begins, so that what was begun can end. If
the pool has no room, the head of the queue waits for held hand-offs to be released.

A step may be planned while others are in flight: the next chunk, or the next prompt, needs no
token of them. What a step computed counts, and enters the prefix cache, when it has ended.
"""

from dataclasses import dataclass, replace
from itertools import islice

from pdserve.cache.block_pool import BlockPool
from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.prefix_cache import PrefixCache, PrefixHit
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import SequenceSlice, StepPlan, StepResult
from pdserve.engine.flights import Flights
from pdserve.engine.scheduler import (
    ChainMaker,
    SchedulerCounters,
    SchedulerLedger,
    SchedulerLoad,
    SequenceRoster,
    SequenceState,
    SequenceTimes,
    Stage,
    WaitingLanes,
    check_references,
    chunk_budget,
    hash_request,
    make_slice,
    max_hit_blocks,
    num_blocks_for,
    num_chunk_tokens,
)
from pdserve.errors import InvalidField, TooLong
from pdserve.request import (
    BlockId,
    FinishReason,
    Request,
    RequestId,
    SampledToken,
    finish_reason_after,
)
from pdserve.timeline import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstSample:
    """The first token here of one sample."""

    request: Request
    """The sample's own, see `Request.sample`."""
    token: SampledToken
    finish_reason: FinishReason | None
    """Set if the token ends the output: this sample is not handed off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillProgress:
    """What a step did for one sequence."""

    request_id: RequestId
    attempt: int
    num_computed: int
    """Leading tokens whose KV is there, cached ones included."""
    samples: tuple[FirstSample, ...]
    """A token for each sample, after the last chunk; the sequence is held from then on."""
    output_index: int | None
    """Output index of those tokens."""


class PrefillScheduler:
    """The queue, the chunks and the blocks of one prefill replica. Engine thread only."""

    def __init__(  # noqa: PLR0913 - where the parts meet
        self,
        config: EngineConfig,
        num_blocks: int,
        revision: str,
        clock: Clock,
        *,
        max_waiting: int,
        look_ahead: int,
        num_stages: int = 1,
        make_chain: ChainMaker = hash_request,
    ) -> None:
        """Starts idle.

        Args:
            config: budgets and block size.
            num_blocks: KV blocks of the pool.
            revision: model revision; KV of different revisions never mixes.
            clock: time of deadlines and stage times.
            max_waiting: requests in the queue; one more is refused.
            look_ahead: queued requests that ask for their reservation before they are computed.
            num_stages: of the pipeline.
            make_chain: names the blocks of a request; a simulator has a cheaper way.
        """
        self._make_chain = make_chain
        self._config = config
        self._revision = revision
        self._clock = clock
        self._look_ahead = look_ahead
        self._num_stages = num_stages
        self._cache = PrefixCache(BlockPool(num_blocks), is_enabled=config.enable_prefix_caching)
        self._roster = SequenceRoster()
        self._lanes = WaitingLanes(max_waiting)
        self._computing: list[SequenceState] = []
        self._flights = Flights(self._cache, self._roster)
        self._counters = SchedulerCounters()

    def tell_cached(self, granules: CachedGranules) -> None:
        """Tells from now on what is cached here; nothing is yet."""
        self._cache.tell(granules)

    @property
    def has_work(self) -> bool:
        """Says whether a step is in flight or the next plan computes something.

        A queue whose head waits for held hand-offs is no work: nothing here could go on.
        """
        if self._flights or self._computing:
            return True
        head = self._lanes.head()
        return head is not None and self._fits(head)

    @property
    def num_held(self) -> int:
        """Sequences whose KV waits for its hand-off to end."""
        return sum(sequence.stage is Stage.HELD for sequence in self._roster)

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since start."""
        return replace(self._counters, stale_refused=self._roster.num_stale_refused)

    def submit(self, request: Request) -> None:
        """Queues a request; an older attempt of it is dropped and its blocks are freed.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
            Overloaded: the queue is full.
            TooLong: the pool could never hold it.
        """
        older = self._roster.older_attempt(request)
        num_tokens = len(request.token_ids)
        if num_tokens == 0:
            raise InvalidField("token_ids", num_tokens, "at least one token")
        max_tokens = self._cache.pool.num_blocks * self._config.block_size
        if num_tokens > max_tokens:
            raise TooLong("token_ids", num_tokens, f"at most {max_tokens}, this worker's KV cache")
        if older is not None:
            self._drop(older)
        self._lanes.require_room()
        chain = self._make_chain(request, self._config.block_size, self._revision)
        self._lanes.push(self._roster.add(request, chain, Stage.WAITING, self._clock.now()))

    def cancel(self, request_id: RequestId, attempt: int | None = None) -> bool:
        """Drops a request at any stage and frees its blocks.

        Args:
            request_id: the request.
            attempt: drops this attempt and older ones; None drops any.

        Returns:
            Whether there was something to drop.
        """
        sequence = self._roster.find(request_id)
        if sequence is None or (attempt is not None and sequence.request.attempt > attempt):
            return False
        self._drop(sequence)
        return True

    def requests_in_window(self) -> tuple[Request, ...]:
        """Names the requests that should ask for their reservation now, each once.

        Those in the queue are named only if their blocks are sure: else decode could be full of
        reservations for prompts that wait here, while KV is held here that waits for decode.
        """
        fresh = [sequence for sequence in self._computing if not sequence.is_announced]
        for sequence in fresh:
            sequence.is_announced = True
        num_claimed = 0
        for sequence in tuple(islice(self._lanes, self._look_ahead)):
            # The whole table counts: what is a cache hit now may be evicted until then.
            num_claimed += num_blocks_for(len(sequence.chain), self._config.block_size)
            if num_claimed > self._cache.pool.num_available:
                break
            if not sequence.is_announced:
                self._lanes.announce(sequence)
                fresh.append(sequence)
        return tuple(sequence.request for sequence in fresh)

    def plan_step(self) -> StepPlan | None:
        """Plans the next step, which the caller launches; None if nothing can be computed.

        Other steps may be in flight.
        """
        budget = self._chunk_budget()
        slices: list[SequenceSlice] = []
        chosen: list[SequenceState] = []
        unplanned = [one for one in self._computing if one.num_planned < len(one.chain)]
        for sequence in unplanned:
            count = num_chunk_tokens(
                sequence.num_planned, len(sequence.chain), budget, may_split_tile=not slices
            )
            if count == 0:
                break
            slices.append(make_slice(sequence, count))
            chosen.append(sequence)
            budget -= count
        has_seat = len(unplanned) == len(slices)
        while has_seat and budget and len(slices) < self._config.max_num_seqs:
            count = self._admit_head(budget, may_split_tile=not slices)
            if count == 0:
                break
            slices.append(make_slice(self._computing[-1], count))
            chosen.append(self._computing[-1])
            budget -= count
        if not slices:
            return None
        plan = StepPlan(slices=tuple(slices))
        self._flights.begin(plan, chosen)
        return plan

    def live_slices(self, plan: StepPlan) -> tuple[SequenceSlice, ...]:
        """Returns the slices of a step in flight whose sequences were not dropped since."""
        return self._flights.live_slices(plan)

    def complete_step(self, plan: StepPlan, result: StepResult) -> tuple[PrefillProgress, ...]:
        """Books the oldest step in flight; sequences dropped meanwhile are left out."""
        # What the last step has put off: somebody waits for what this one has made.
        self._cache.settle()
        progress: list[PrefillProgress] = []
        for part, sequence in self._flights.land(plan):
            sequence.num_computed_here += len(part.token_ids)
            self._counters.prompt_tokens += len(part.token_ids)
            self._cache.enter(sequence.table, sequence.chain, part.end)
            samples: tuple[FirstSample, ...] = ()
            if part.output_index is not None:
                samples = _first_samples(part.request, part.output_index, result)
                self._hold(sequence)
            progress.append(
                PrefillProgress(
                    request_id=part.request.request_id,
                    attempt=part.request.attempt,
                    num_computed=part.end,
                    samples=samples,
                    output_index=part.output_index,
                )
            )
        return tuple(progress)

    def release(self, request_id: RequestId, attempt: int) -> None:
        """Ends a held sequence: its blocks go to the prefix cache.

        Raises:
            StaleAttempt: this attempt is not held here.
        """
        self._drop(self._roster.require(request_id, attempt, Stage.HELD))

    def stage_of(self, request_id: RequestId) -> Stage | None:
        """Returns where a request stands; None if it is not here."""
        sequence = self._roster.find(request_id)
        return None if sequence is None else sequence.stage

    def requests(self) -> tuple[Request, ...]:
        """Returns all requests here, the oldest first."""
        return tuple(sequence.request for sequence in self._roster)

    def block_table(self, request_id: RequestId, attempt: int) -> tuple[BlockId, ...]:
        """Returns the blocks of a request that is computing or held.

        Raises:
            StaleAttempt: this attempt is not here, or waits.
        """
        sequence = self._roster.require(request_id, attempt, Stage.COMPUTING, Stage.HELD)
        return tuple(sequence.table.block_ids)

    def num_cached_tokens(self, request_id: RequestId) -> int:
        """Returns the tokens whose KV came from the prefix cache.

        Raises:
            StaleAttempt: it is not here.
        """
        return self._roster.require(request_id, None).num_cached_tokens

    def times(self, request_id: RequestId) -> SequenceTimes:
        """Returns how long a request waited and computed.

        Raises:
            StaleAttempt: it is not here.
        """
        return self._roster.require(request_id, None).times

    def expired(self, now_s: float) -> tuple[RequestId, ...]:
        """Names the requests whose deadline has passed; the caller cancels them."""
        return self._roster.expired(now_s)

    def load(self) -> SchedulerLoad:
        """Returns how busy the worker is."""
        pool = self._cache.pool
        return SchedulerLoad(
            num_waiting=len(self._lanes),
            num_running=len(self._computing),
            queued_tokens=sum(
                len(sequence.chain) - sequence.num_computed
                for sequence in (*self._lanes, *self._computing)
            ),
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            reserved_blocks=0,
            active_blocks=pool.num_referenced,
        )

    def ledger(self) -> SchedulerLedger:
        """Returns what is held."""
        pool = self._cache.pool
        return SchedulerLedger(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            sequences=len(self._lanes) + len(self._computing),
            reservations=0,
            held_handoffs=self.num_held,
        )

    def check(self) -> None:
        """Asserts that pool, cache and tables agree."""
        self._cache.check()
        tables = (sequence.table for sequence in self._roster)
        check_references(self._cache.pool, (*tables, *self._flights.held_tables()))

    def _chunk_budget(self) -> int:
        if self._num_stages == 1:
            return self._config.max_num_batched_tokens
        waiting = (*self._computing, *self._lanes)
        num_pending = sum(len(one.chain) - one.num_planned for one in waiting)
        return chunk_budget(self._config.max_num_batched_tokens, num_pending, self._num_stages)

    def _admit_head(self, budget: int, *, may_split_tile: bool) -> int:
        """Moves the head of the queue to computing and returns its first chunk; 0: it waits."""
        sequence = self._lanes.head()
        if sequence is None:
            return 0
        num_tokens = len(sequence.chain)
        hit = self._find(sequence)
        num_cached = len(hit.block_ids) * self._config.block_size
        count = num_chunk_tokens(num_cached, num_tokens, budget, may_split_tile=may_split_tile)
        num_blocks = num_blocks_for(num_tokens, self._config.block_size)
        if count == 0 or not self._cache.can_open(hit, num_blocks):
            return 0
        self._lanes.remove(sequence)
        sequence.table = self._cache.open(hit, num_blocks)
        sequence.num_computed = sequence.num_cached_tokens = num_cached
        sequence.stage = Stage.COMPUTING
        sequence.started_s = self._clock.now()
        self._computing.append(sequence)
        self._counters.prefix_cache_queries += num_tokens
        self._counters.prefix_cache_hits += num_cached
        return count

    def _find(self, sequence: SequenceState) -> PrefixHit:
        chain = sequence.chain
        return self._cache.find(chain, max_hit_blocks(sequence.request, chain))

    def _fits(self, sequence: SequenceState) -> bool:
        num_blocks = num_blocks_for(len(sequence.chain), self._config.block_size)
        return self._cache.can_open(self._find(sequence), num_blocks)

    def _hold(self, sequence: SequenceState) -> None:
        self._computing.remove(sequence)
        sequence.stage = Stage.HELD
        sequence.sampled_s = self._clock.now()
        self._counters.generation_tokens += sequence.request.sampling.n

    def _drop(self, sequence: SequenceState) -> None:
        if sequence.stage is Stage.WAITING:
            self._lanes.remove(sequence)
        elif sequence.stage is Stage.COMPUTING:
            self._computing.remove(sequence)
        self._flights.close(sequence)
        self._roster.remove(sequence)


def _first_samples(
    request: Request, output_index: int, result: StepResult
) -> tuple[FirstSample, ...]:
    samples = []
    for one in request.samples():
        token = result.sampled[one.request_id]
        reason = finish_reason_after(one, output_index + 1, token.token_id)
        samples.append(FirstSample(request=one, token=token, finish_reason=reason))
    return tuple(samples)
