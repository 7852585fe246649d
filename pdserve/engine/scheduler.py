"""What both schedulers are made of: sequences and their fence, the waiting lanes, slices of a step.

Plain data on an injected clock. A scheduler belongs to the engine thread; nothing here is locked.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.cache.block_hash import HashChain
from pdserve.cache.block_pool import BlockPool
from pdserve.cache.prefix_cache import BlockTable
from pdserve.config.engine import ATTENTION_TILE_TOKENS
from pdserve.engine.batch import SequenceSlice, is_chosen_on_device
from pdserve.errors import Overloaded, StaleAttempt
from pdserve.request import Request, RequestId


class Stage(StrEnum):
    """Where a sequence stands in one scheduler."""

    WAITING = "waiting"
    """In a lane; holds no block."""
    COMPUTING = "computing"
    """Its prompt is being computed; holds blocks for all of it."""
    HELD = "held"
    """Prefill only: the next token is sampled, the KV waits for the hand-off to end."""
    RESERVED = "reserved"
    """Decode only: holds blocks that KV is arriving in."""
    RUNNING = "running"
    """Decode only: makes one token a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTimes:
    """How long a sequence waited and computed; None where that has not happened yet."""

    queue_s: float | None
    prefill_s: float | None


NO_TIMES = SequenceTimes(queue_s=None, prefill_s=None)


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """One sequence in a scheduler: enough to go on, or to be replayed elsewhere."""

    request: Request
    chain: HashChain
    """All known tokens: the request's and those sampled here."""
    arrival: int
    """Counts up over one scheduler; the lower, the older."""
    arrived_s: float
    stage: Stage
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    """Leading tokens with valid KV."""
    num_flying: int = 0
    """Tokens behind them that steps in flight compute; the last one may be unknown yet."""
    num_cached_tokens: int = 0
    """Tokens whose KV came from the prefix cache."""
    num_computed_here: int = 0
    """Tokens of the request that this worker computed itself."""
    started_s: float | None = None
    """When its computing began."""
    sampled_s: float | None = None
    """When its first token here was sampled."""
    max_computed_here: int | None = None
    """Decode only: most tokens of the request to compute here; None: any number."""
    has_lost_handoff: bool = False
    """Decode only: it came to be computed here, and nobody chose that."""
    is_announced: bool = False
    """Prefill only: its reservation was asked for."""
    lane: int | None = None
    """Decode only: which steps of a pipeline it runs in; None: in none yet."""
    is_awaitable: bool = field(init=False)
    """A step may be planned for a token of it that is still in flight."""

    def __post_init__(self) -> None:
        """Looks once at what never changes."""
        self.is_awaitable = is_chosen_on_device(self.request)

    @property
    def num_planned(self) -> int:
        """Leading tokens whose KV is valid, or will be when the steps in flight have ended."""
        return self.num_computed + self.num_flying

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, over all attempts; also the next output index."""
        return len(self.chain) - self.request.num_prompt_tokens

    @property
    def times(self) -> SequenceTimes:
        """How long it waited and computed until now."""
        if self.started_s is None:
            return NO_TIMES
        prefill_s = None if self.sampled_s is None else self.sampled_s - self.started_s
        return SequenceTimes(queue_s=self.started_s - self.arrived_s, prefill_s=prefill_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLoad:
    """How busy a scheduler is; free + cached + reserved + active = total blocks."""

    num_waiting: int
    num_running: int
    """Sequences that are computing, or running on decode."""
    queued_tokens: int
    """Prompt tokens still to compute."""
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    reserved_blocks: int
    """Blocks that KV is arriving in."""
    active_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLedger:
    """What is held: when idle, free + cached = total and the rest is 0."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    sequences: int
    reservations: int
    held_handoffs: int


@dataclass(kw_only=True, slots=True)
class SchedulerCounters:
    """Totals since start."""

    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    """Those of them that should have been handed off."""
    """Tokens of requests that were computed here."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens found there."""
    preemptions: int = 0
    stale_refused: int = 0
    """Calls that meant a fenced attempt."""


ChainMaker = Callable[[Request, int, str], HashChain]
"""Makes the chain of a request's tokens, given the block size and the model's revision."""


def hash_request(request: Request, block_size: int, revision: str) -> HashChain:
    """Hashes a request's tokens."""
    return HashChain(request.token_ids, block_size, request.tenant_salt, revision)


class SequenceRoster:
    """The sequences of one scheduler, at most one attempt of each request."""

    def __init__(self) -> None:
        """Starts empty."""
        self._by_id: dict[RequestId, SequenceState] = {}
        self._num_arrived = 0
        self.num_stale_refused = 0
        """Calls that meant an attempt which is not here."""

    def __len__(self) -> int:
        """Counts sequences of all stages."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[SequenceState]:
        """Walks over all sequences, the oldest first."""
        return iter(tuple(self._by_id.values()))

    def find(self, request_id: RequestId) -> SequenceState | None:
        """Returns the live attempt of a request."""
        return self._by_id.get(request_id)

    def older_attempt(self, request: Request) -> SequenceState | None:
        """Returns the attempt that `request` replaces, which the caller must drop first.

        Raises:
            StaleAttempt: this attempt or a newer one is here.
        """
        known = self._by_id.get(request.request_id)
        if known is not None and known.request.attempt >= request.attempt:
            raise self._refuse(
                f"request {request.request_id}: attempt {request.attempt} came after "
                f"attempt {known.request.attempt}"
            )
        return known

    def require(self, request_id: RequestId, attempt: int | None, *stages: Stage) -> SequenceState:
        """Returns a live sequence; `attempt` None takes any, no stages allow all.

        Raises:
            StaleAttempt: it is not here, is another attempt or is at another stage.
        """
        found = self._by_id.get(request_id)
        if found is None:
            raise self._refuse(f"request {request_id} is not here")
        if attempt is not None and found.request.attempt != attempt:
            raise self._refuse(
                f"request {request_id}: attempt {attempt} is not here, "
                f"attempt {found.request.attempt} is"
            )
        if stages and found.stage not in stages:
            raise self._refuse(f"request {request_id} is {found.stage}, not {stages[0]}")
        return found

    def add(self, request: Request, chain: HashChain, stage: Stage, now_s: float) -> SequenceState:
        """Makes the state of a request that is not here."""
        assert request.request_id not in self._by_id
        sequence = SequenceState(
            request=request, chain=chain, arrival=self._num_arrived, arrived_s=now_s, stage=stage
        )
        self._num_arrived += 1
        self._by_id[request.request_id] = sequence
        return sequence

    def remove(self, sequence: SequenceState) -> None:
        """Forgets a sequence."""
        del self._by_id[sequence.request.request_id]

    def is_live(self, sequence: SequenceState) -> bool:
        """Says whether the sequence is still here, in this very attempt."""
        return self._by_id.get(sequence.request.request_id) is sequence

    def expired(self, now_s: float) -> tuple[RequestId, ...]:
        """Names the requests whose time budget has run out."""
        return tuple(
            sequence.request.request_id
            for sequence in self._by_id.values()
            if sequence.request.deadline_s is not None
            and now_s >= sequence.arrived_s + sequence.request.deadline_s
        )

    def _refuse(self, message: str) -> StaleAttempt:
        self.num_stale_refused += 1
        return StaleAttempt(message)


class WaitingLanes:
    """Bounded first-come-first-served queues: returned requests go before new ones.

    Announced ones go before both: decode holds blocks for them, so nobody may overtake them.
    """

    def __init__(self, max_waiting: int) -> None:
        """Takes at most `max_waiting` sequences, all lanes together."""
        self._max_waiting = max_waiting
        self._announced: deque[SequenceState] = deque()
        self._priority: deque[SequenceState] = deque()
        self._normal: deque[SequenceState] = deque()

    def __len__(self) -> int:
        """Counts all lanes."""
        return len(self._announced) + len(self._priority) + len(self._normal)

    def __iter__(self) -> Iterator[SequenceState]:
        """Walks in the order of service."""
        yield from self._announced
        yield from self._priority
        yield from self._normal

    def require_room(self) -> None:
        """Checks the bound.

        Raises:
            Overloaded: the lanes are full.
        """
        if len(self) >= self._max_waiting:
            raise Overloaded(f"{len(self)} requests wait already, the limit of this worker")

    def push(self, sequence: SequenceState) -> None:
        """Puts a sequence behind the others of its lane."""
        self._lane_of(sequence).append(sequence)

    def announce(self, sequence: SequenceState) -> None:
        """Lets a waiting sequence pass all that are not announced."""
        self.remove(sequence)
        sequence.is_announced = True
        self.push(sequence)

    def head(self) -> SequenceState | None:
        """Returns who is served next."""
        return next(iter(self), None)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, wherever it stands."""
        self._lane_of(sequence).remove(sequence)

    def _lane_of(self, sequence: SequenceState) -> deque[SequenceState]:
        if sequence.is_announced:
            return self._announced
        return self._priority if sequence.request.is_priority else self._normal


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def max_hit_blocks(request: Request, chain: HashChain) -> int:
    """Returns how many cached blocks a request may take instead of computing them.

    The last token is always computed, for its logits; and a prompt whose log-probabilities are
    wanted is computed as a whole, for all of its logits.
    """
    if request.sampling.prompt_logprobs is not None:
        return 0
    return (len(chain) - 1) // chain.block_size


def num_chunk_tokens(start: int, end: int, budget: int, *, may_split_tile: bool) -> int:
    """Returns how many of the tokens [start, end) to compute in this step.

    A chunk that is not the last ends on a tile of attention, since a tile cut in two is computed
    twice; where not even one tile ends within the budget it is split, or 0 returned.
    """
    if end - start <= budget:
        return end - start
    last_tile_end = (start + budget) // ATTENTION_TILE_TOKENS * ATTENTION_TILE_TOKENS
    if last_tile_end > start:
        return last_tile_end - start
    return budget if may_split_tile else 0


def chunk_budget(budget: int, num_pending: int, num_stages: int) -> int:
    """Returns how many prompt tokens one step of a pipeline takes at most.

    A prompt that is alone is cut up, so that its first chunks are in later stages while the
    others follow: in 2 chunks a stage, but in none below an eighth of the budget, since small
    ones are computed less well.

    Args:
        budget: tokens of a step.
        num_pending: prompt tokens that wait to be planned.
        num_stages: of the pipeline.
    """
    wanted = max(-(-num_pending // (2 * num_stages)), budget // 8)
    return min(budget, -(-wanted // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS)


def make_slice(sequence: SequenceState, num_tokens: int) -> SequenceSlice:
    """Returns the next tokens of a sequence as a slice; it samples if they are the last known.

    The one behind the last known is awaited from the step in flight.
    """
    start = sequence.num_planned
    end = start + num_tokens
    chain, request = sequence.chain, sequence.request
    num_known = len(chain)
    is_last = end >= num_known
    output_ids: tuple[int, ...] = ()
    if is_last and request.sampling.has_penalties:
        output_ids = chain.tokens(request.num_prompt_tokens, num_known)
    targets: tuple[int, ...] = ()
    if request.sampling.prompt_logprobs is not None:
        targets = chain.tokens(start + 1, min(end + 1, request.num_prompt_tokens))
    return SequenceSlice(
        request=request,
        start=start,
        token_ids=chain.tokens(start, end),
        block_ids=sequence.table.snapshot(),
        output_index=end - request.num_prompt_tokens if is_last else None,
        output_ids=output_ids,
        prompt_targets=targets,
        awaits_token=end > num_known,
    )


def make_running_slice(sequence: SequenceState) -> SequenceSlice:
    """Returns what `make_slice` does for the next token of a running sequence, in less time."""
    request, start = sequence.request, sequence.num_computed + sequence.num_flying
    output_ids: tuple[int, ...] = ()
    if not sequence.is_awaitable and request.sampling.has_penalties:
        output_ids = sequence.chain.tokens(request.num_prompt_tokens, start + 1)
    awaits_token = sequence.num_flying > 0
    return SequenceSlice(
        request=request,
        start=start,
        token_ids=() if awaits_token else (sequence.chain.last,),
        block_ids=sequence.table.snapshot(),
        output_index=start + 1 - request.num_prompt_tokens,
        output_ids=output_ids,
        awaits_token=awaits_token,
    )


def check_references(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Asserts that every reference on a block is held by exactly one table."""
    held = Counter(block for table in tables for block in table.block_ids)
    assert len(held) == pool.num_referenced, "a referenced block is in no table"
    assert all(pool.num_references(block) == count for block, count in held.items())
