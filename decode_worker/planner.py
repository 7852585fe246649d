"""What a step of a decode worker consists of: running sequences first, then chunks of prompts.

A step may be planned while others are in flight. A running sequence in one of them is planned one
token further, and the slice *awaits* the unknown token:

    step k    computes token p     samples token p + 1
    step k+1  computes token p + 1, known to the device alone, samples token p + 2

One unknown token at most: the step behind k+1 is planned when k has ended. Never beyond
`max_tokens`: that end is known in advance. A stop token is not: the slice behind it is computed in
vain and ignored (`pdserve.engine.flights`). Sequences whose tokens are chosen on the host, see
`is_chosen_on_device`, wait for the step in flight: they are in every second step while others keep
steps flying, and in every one when they are alone.

In a pipeline of several stages steps take turns among lanes of running sequences (see `lanes`), and
first tokens of prompts are not awaited; where tokens are not fed on the device, none are.

Who must go when blocks run out is decided only when nothing is in flight, since what goes then
gives its blocks back at once. So a shortage with a step in flight plans nothing: the caller takes
that step's result and comes back. Then one step is made of all lanes: samples that share a block
are neighbours in age, which the order of giving up relies on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.lanes import Lanes
from decode_worker.occupancy import BlockCopy, Occupancy
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import Lookahead, SequenceSlice, StepPlan
from pdserve.engine.scheduler import (
    SequenceState,
    Stage,
    chunk_budget,
    make_running_slice,
    make_slice,
    num_chunk_tokens,
)
from pdserve.timeline import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A plan, and what it was made of."""

    plan: StepPlan
    sequences: tuple[SequenceState, ...]
    """Of the plan's slices, in their order."""


class _Draft:
    """A step while it is made."""

    def __init__(self) -> None:
        self.slices: list[SequenceSlice] = []
        self.sequences: list[SequenceState] = []
        self.copies: list[BlockCopy] = []

    def add(self, sequence: SequenceState, num_tokens: int) -> None:
        self.slices.append(make_slice(sequence, num_tokens))
        self.sequences.append(sequence)


class StepPlanner:
    """Plans steps of one decode replica. Engine thread only."""

    def __init__(
        self, config: EngineConfig, occupancy: Occupancy, clock: Clock, lookahead: Lookahead
    ) -> None:
        """Plans over the sequences and blocks of `occupancy`, which it changes."""
        self._config = config
        self._occupancy = occupancy
        self._clock = clock
        self._lookahead = lookahead
        self._lanes = Lanes(lookahead.num_stages)

    def plan(self) -> PlannedStep | None:
        """Plans the next step; None if nothing can be computed before one in flight ends."""
        occupancy = self._occupancy
        running = self._choose_lane()
        lacking = [sequence for sequence in running if occupancy.lacks_block(sequence)]
        if len(lacking) > occupancy.cache.pool.num_available:
            if occupancy.flights:
                return None
            running = self._choose_running(occupancy.running, num_lanes=1)
            lacking = [sequence for sequence in running if occupancy.lacks_block(sequence)]
        draft = _Draft()
        # The oldest first: whoever must go for one of them is younger.
        for sequence in lacking:
            if occupancy.roster.is_live(sequence):
                occupancy.prepare(sequence, draft.copies)
        if lacking:
            running = [sequence for sequence in running if occupancy.roster.is_live(sequence)]
            # Samples that share a block are neighbours in age, and the last of them lacks none:
            # nobody who is younger than the copier and needs a block makes that one go.
            pool = occupancy.cache.pool
            assert all(pool.num_references(source) for source, _ in draft.copies)
        draft.slices.extend(map(make_running_slice, running))
        draft.sequences.extend(running)
        if running and running[0].lane is not None:
            self._lanes.note(running[0].lane)
        self._add_chunks(draft)
        if not draft.slices:
            return None
        return PlannedStep(
            plan=StepPlan(slices=tuple(draft.slices), copies=tuple(draft.copies)),
            sequences=tuple(draft.sequences),
        )

    def _choose_lane(self) -> list[SequenceState]:
        """Returns who can run in the lane whose turn it is, or else in the one after."""
        running, num_lanes = self._occupancy.running, self._lookahead.num_stages
        if num_lanes == 1:
            return self._choose_running(running, num_lanes)
        self._lanes.settle(running)
        for lane in self._lanes.turns:
            in_lane = [sequence for sequence in running if sequence.lane == lane]
            chosen = self._choose_running(in_lane, num_lanes)
            if chosen:
                return chosen
        return []

    def _choose_running(
        self, running: Sequence[SequenceState], num_lanes: int
    ) -> list[SequenceState]:
        # Prompts that are being computed keep their seats, or landing sequences would starve them.
        num_computing = len(self._occupancy.computing)
        num_seats = self._config.max_num_seqs - num_computing
        max_running = min(
            -(-num_seats // num_lanes),
            self._config.max_num_batched_tokens - bool(num_computing),
        )
        chosen = [
            sequence
            for sequence in running
            if sequence.num_flying == 0 or self._may_go_ahead(sequence)
        ]
        return chosen[: max(1, max_running)]

    def _add_chunks(self, draft: _Draft) -> None:
        """Adds prompts in the order in which they were begun, then those that can begin."""
        budget = min(self._config.max_num_batched_tokens - len(draft.slices), self._chunk_budget())
        max_slices, may_await = self._config.max_num_seqs, self._lookahead.num_stages == 1
        may_split_tile = True
        for sequence in self._occupancy.computing:
            start, end = sequence.num_planned, len(sequence.chain)
            if start >= end:
                # Its first token is in flight.
                has_room = budget and len(draft.slices) < max_slices
                if has_room and may_await and self._may_go_ahead(sequence):
                    draft.add(sequence, 1)
                    budget -= 1
                continue
            count = num_chunk_tokens(start, end, budget, may_split_tile=may_split_tile)
            if count == 0 or len(draft.slices) >= max_slices:
                return
            draft.add(sequence, count)
            budget -= count
            may_split_tile = False
        while self._has_free_seat() and len(draft.slices) < max_slices:
            count = self._admit_head(budget, may_split_tile=may_split_tile)
            if count == 0:
                return
            draft.add(self._occupancy.computing[-1], count)
            budget -= count
            may_split_tile = False

    def _chunk_budget(self) -> int:
        if self._lookahead.num_stages == 1:
            return self._config.max_num_batched_tokens
        occupancy = self._occupancy
        waiting = (*occupancy.computing, *occupancy.lanes)
        num_pending = sum(max(0, len(one.chain) - one.num_planned) for one in waiting)
        return chunk_budget(
            self._config.max_num_batched_tokens, num_pending, self._lookahead.num_stages
        )

    def _may_go_ahead(self, sequence: SequenceState) -> bool:
        """Says whether a sequence can be planned on while its next token is in flight."""
        request = sequence.request
        if not (self._lookahead.feeds_tokens and sequence.is_awaitable):
            return False
        if sequence.num_planned > len(sequence.chain):
            return False
        if sequence.stage is Stage.COMPUTING and request.sampling.prompt_logprobs is not None:
            return False
        # With the awaited token; it may be the last one.
        num_outputs = sequence.num_planned + 1 - request.num_prompt_tokens
        return num_outputs < request.sampling.max_tokens

    def _has_free_seat(self) -> bool:
        num_seated = len(self._occupancy.running) + len(self._occupancy.computing)
        return num_seated < self._config.max_num_seqs

    def _admit_head(self, budget: int, *, may_split_tile: bool) -> int:
        """Moves the head of the queue to computing and returns its first chunk; 0: it waits."""
        occupancy = self._occupancy
        sequence = occupancy.lanes.head()
        if sequence is None:
            return 0
        hit = occupancy.find_for_computing(sequence.request, sequence.chain)
        num_cached, num_tokens = occupancy.num_hit_tokens(hit), len(sequence.chain)
        limit = sequence.max_computed_here
        if limit is not None and num_tokens - num_cached > limit:
            # What it counted on was evicted while it waited.
            occupancy.give_up(sequence)
            return 0
        need = occupancy.need(sequence.request)
        count = num_chunk_tokens(num_cached, num_tokens, budget, may_split_tile=may_split_tile)
        if count == 0 or not occupancy.has_room(hit, need):
            return 0
        occupancy.lanes.remove(sequence)
        occupancy.open(sequence, hit, need)
        sequence.num_computed = num_cached
        sequence.stage = Stage.COMPUTING
        sequence.started_s = self._clock.now()
        occupancy.computing.append(sequence)
        return count
