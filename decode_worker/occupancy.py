"""Which sequences are on a decode worker, and which blocks each of them holds.

A sequence owns the references of its table from `open` until `drop`; nobody else frees them. What
is dropped while a step in flight uses it belongs to that flight from then on.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass

from decode_worker.admission import BlockNeed, block_need, has_room
from pdserve.cache.block_hash import HashChain
from pdserve.cache.block_pool import BlockPool
from pdserve.cache.prefix_cache import PrefixCache, PrefixHit
from pdserve.config.engine import EngineConfig
from pdserve.engine.flights import Flights
from pdserve.engine.scheduler import (
    ChainMaker,
    SchedulerCounters,
    SchedulerLedger,
    SchedulerLoad,
    SequenceRoster,
    SequenceState,
    Stage,
    WaitingLanes,
    check_references,
    max_hit_blocks,
    num_blocks_for,
)
from pdserve.request import BlockId, Request

BlockCopy = tuple[BlockId, BlockId]
"""Source and target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LetGo:
    """A healthy sequence that this worker gave up; its blocks are freed."""

    request: Request
    stage: Stage
    """`reserved`: the prefill worker still has the KV and needs another place for it. Any other:
    the router continues it as its next attempt."""
    next_index: int
    """First output index that was not made here."""


class Occupancy:
    """The sequences, queue and blocks of one decode replica. Engine thread only."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        revision: str,
        *,
        max_waiting: int,
        make_chain: ChainMaker,
    ) -> None:
        """Starts empty."""
        self._make_chain = make_chain
        self._block_size = config.block_size
        self._revision = revision
        self.cache = PrefixCache(BlockPool(num_blocks), is_enabled=config.enable_prefix_caching)
        self.roster = SequenceRoster()
        self.lanes = WaitingLanes(max_waiting)
        self.computing: list[SequenceState] = []
        self.running: list[SequenceState] = []
        """The oldest first, as in the roster."""
        self.flights = Flights(self.cache, self.roster)
        self.counters = SchedulerCounters()
        self._let_go: list[LetGo] = []

    def chain(self, request: Request) -> HashChain:
        """Hashes a request's tokens."""
        return self._make_chain(request, self._block_size, self._revision)

    def need(self, request: Request) -> BlockNeed:
        """Returns the blocks a request needs at its start and at its longest."""
        return block_need(
            len(request.token_ids),
            request.num_prompt_tokens + request.sampling.max_tokens,
            self._block_size,
            request.sampling.n,
        )

    def find_for_landing(self, chain: HashChain) -> PrefixHit:
        """Finds what need not be sent: any full block, since the next token comes along."""
        return self.cache.find(chain, chain.num_full_blocks)

    def find_for_computing(self, request: Request, chain: HashChain) -> PrefixHit:
        """Finds what need not be computed."""
        return self.cache.find(chain, max_hit_blocks(request, chain))

    def num_hit_tokens(self, hit: PrefixHit) -> int:
        """Returns the tokens in the blocks of a hit."""
        return len(hit.block_ids) * self._block_size

    def has_room(self, hit: PrefixHit, need: BlockNeed, num_claimed: int = 0) -> bool:
        """Says whether a sequence can start, `num_claimed` blocks being meant for another."""
        num_available = self.cache.pool.num_available - hit.num_unreferenced - num_claimed
        num_growing = len(self.running)
        num_growing += sum(sequence.request.sampling.n for sequence in self.computing)
        return has_room(num_available, num_growing, need.num_table_blocks - len(hit.block_ids))

    def num_claimed_by_head(self) -> int:
        """Returns the available blocks that the head of the queue waits for.

        Reservations leave them alone: else those that come later would starve it.
        """
        head = self.lanes.head()
        if head is None:
            return 0
        hit = self.find_for_computing(head.request, head.chain)
        num_new = self.need(head.request).num_table_blocks - len(hit.block_ids)
        return num_new + hit.num_unreferenced

    def open(self, sequence: SequenceState, hit: PrefixHit, need: BlockNeed) -> None:
        """Takes all blocks a sequence needs to start.

        Raises:
            NoFreeBlocks: there is no room, which `has_room` would have told.
        """
        sequence.table = self.cache.open(hit, need.num_table_blocks)
        sequence.num_cached_tokens = self.num_hit_tokens(hit)
        self.counters.prefix_cache_queries += len(sequence.chain)
        self.counters.prefix_cache_hits += sequence.num_cached_tokens

    def lacks_block(self, sequence: SequenceState) -> bool:
        """Says whether a running sequence has no block of its own for its next token."""
        index = sequence.num_planned // self._block_size
        blocks = sequence.table.block_ids
        return index == len(blocks) or self.cache.pool.is_shared(blocks[index])

    def prepare(self, sequence: SequenceState, copies: list[BlockCopy]) -> None:
        """Gives a running sequence a block of its own for its next token, or lets it go.

        While no block is left the youngest holder goes. One that is alone never needs more than
        the pool has: that was checked when it came.

        Args:
            sequence: the sequence.
            copies: blocks to copy before the step; one is added if other samples read the present
                block of the sequence.
        """
        while self.lacks_block(sequence):
            if self.cache.pool.num_available:
                self._take_block(sequence, copies)
                return
            youngest = [holder for holder in self.roster if holder.table.block_ids][-1]
            self.give_up(youngest)
            if youngest is sequence:
                return

    def _take_block(self, sequence: SequenceState, copies: list[BlockCopy]) -> None:
        index = sequence.num_planned // self._block_size
        if index == len(sequence.table.block_ids):
            self.cache.grow(sequence.table, index + 1)
            return
        copy = self.cache.make_writable(sequence.table, index)
        assert copy is not None
        copies.append(copy)

    def go_on(self, sequence: SequenceState, tokens: Mapping[int, int]) -> tuple[Request, ...]:
        """Lets each sample with a token run, and drops what is left of the sequence.

        The samples share the blocks of the tokens known so far; the blocks that were held for
        their growth are free for them now, one for each.

        Args:
            sequence: KV of all its tokens is valid.
            tokens: the next token, by sample index; samples that have ended have none.

        Returns:
            What runs now; a sample of which a newer attempt is here does not.
        """
        request = sequence.request
        if request.sampling.n == 1 and tokens:
            self.run(sequence, tokens[request.sample_index])
            return (request,)
        samples = [request.sample(index) for index in tokens]
        forks = [self._fork(sequence, one) for one in samples if self._admits(one)]
        self.drop(sequence)
        for fork in forks:
            self.run(fork, tokens[fork.request.sample_index])
        return tuple(fork.request for fork in forks)

    def _admits(self, sample: Request) -> bool:
        known = self.roster.find(sample.request_id)
        if known is None:
            return True
        if known.request.attempt >= sample.attempt:
            return False
        self.drop(known)
        return True

    def _fork(self, sequence: SequenceState, sample: Request) -> SequenceState:
        fork = self.roster.add(sample, sequence.chain.fork(), Stage.RUNNING, sequence.arrived_s)
        num_shared = num_blocks_for(len(sequence.chain), self._block_size)
        fork.table = self.cache.fork(sequence.table, num_shared)
        fork.num_computed = sequence.num_computed
        self.running.append(fork)
        return fork

    def run(self, sequence: SequenceState, token_id: int) -> None:
        """Appends a sampled token; the sequence runs from then on."""
        if sequence.stage is not Stage.RUNNING:
            if sequence.stage is Stage.COMPUTING:
                self.computing.remove(sequence)
            sequence.stage = Stage.RUNNING
            insort(self.running, sequence, key=lambda one: one.arrival)
        sequence.chain.append(token_id)

    def give_up(self, sequence: SequenceState) -> None:
        """Drops a healthy sequence and notes that it is to go on elsewhere."""
        if sequence.stage in (Stage.RUNNING, Stage.COMPUTING):
            self.counters.preemptions += 1
        self._let_go.append(
            LetGo(
                request=sequence.request,
                stage=sequence.stage,
                next_index=sequence.num_output_tokens,
            )
        )
        self.drop(sequence)

    def take_let_go(self) -> tuple[LetGo, ...]:
        """Returns, once, what was given up."""
        taken = tuple(self._let_go)
        self._let_go.clear()
        return taken

    def drop(self, sequence: SequenceState) -> None:
        """Forgets a sequence at any stage and frees its blocks."""
        if sequence.stage is Stage.WAITING:
            self.lanes.remove(sequence)
        elif sequence.stage is Stage.COMPUTING:
            self.computing.remove(sequence)
        elif sequence.stage is Stage.RUNNING:
            self.running.remove(sequence)
        self.flights.close(sequence)
        self.roster.remove(sequence)

    def load(self) -> SchedulerLoad:
        """Returns how busy the worker is."""
        pool = self.cache.pool
        num_reserved_blocks = sum(
            len(sequence.table.block_ids) - sequence.table.num_hit_blocks
            for sequence in self._reserved()
        )
        return SchedulerLoad(
            num_waiting=len(self.lanes),
            num_running=len(self.running) + len(self.computing),
            queued_tokens=sum(
                len(sequence.chain) - sequence.num_computed
                for sequence in (*self.lanes, *self.computing)
            ),
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            reserved_blocks=num_reserved_blocks,
            active_blocks=pool.num_referenced - num_reserved_blocks,
        )

    def ledger(self) -> SchedulerLedger:
        """Returns what is held."""
        pool = self.cache.pool
        num_reserved = len(self._reserved())
        return SchedulerLedger(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            sequences=len(self.roster) - num_reserved,
            reservations=num_reserved,
            held_handoffs=0,
        )

    def check(self) -> None:
        """Asserts that pool, cache, tables and lists agree."""
        self.cache.check()
        tables = (sequence.table for sequence in self.roster)
        check_references(self.cache.pool, (*tables, *self.flights.held_tables()))
        assert self.running == [one for one in self.roster if one.stage is Stage.RUNNING]

    def _reserved(self) -> list[SequenceState]:
        return [sequence for sequence in self.roster if sequence.stage is Stage.RESERVED]
