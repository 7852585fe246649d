"""Where a request goes: the seam between a front and the brain that knows the cluster."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pdserve.request import RequestId, Role
from pdserve.timeline import Clock
from router.cost import LawTable, prefill_terms
from router.demand import Demand
from router.fair_queue import Turn
from router.load_book import DecodeCharge, LoadBook
from router.policy import Choice, Policy
from router.prefix_index import GRANULE_TOKENS, PrefixIndex
from router.prompt_queue import Terms
from router.slo import TooLate
from router.worker_key import WorkerKey

FIRST_GUESS_TOKENS = 256.0
"""Length of an output before any has ended."""
MIN_RETRY_S = 0.05
OUTPUT_WEIGHT = 0.02
"""Of one output in the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceQuery:
    """A request that wants workers."""

    request_id: RequestId
    num_tokens: int
    """Tokens to be in the cache when decoding begins."""
    num_growth_tokens: int
    """Output tokens that may still come."""
    granules: Sequence[int]
    """Keys of its prefix, see `prefix_index`."""
    may_be_local: bool = True
    """A decode worker may prefill it, if only little is uncached there."""
    excluded: Collection[WorkerKey] = ()
    followers: Collection[RequestId] = ()
    """Other samples of its prompt that go where it goes, and grow as it does."""
    has_prefill_pool: bool = True
    """Without one, decode workers prefill everything themselves."""
    tpot_slo_s: float | None = None
    """Wanted seconds per output token."""
    ttft_slo_s: float | None = None
    """Wanted seconds from now to the first token; a request that would miss it is refused."""
    tenant: str = ""
    """Whose share it takes while it waits for its turn."""
    priority: int = 0
    waits_for_turn: bool = False
    """Lets those go first whose turn is earlier; what was under way already waits for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A choice, and what it was charged."""

    choice: Choice
    prompt: Terms | None
    """At whoever computes the prompt; None: it is computed already."""
    decode: DecodeCharge
    follower: DecodeCharge
    """Of each other sample."""


class Room(Protocol):
    """Where requests wait for their turn."""

    def tokens_before(self, priority: int) -> int:
        """Returns the uncached tokens of those that are probably served before a new request."""
        ...

    async def wait_for_turn(self, turn: Turn, *, has_prefill_pool: bool) -> None:
        """Returns when a request may be placed; a cancelled wait gives its turn away."""
        ...


class Placer(Protocol):
    """Chooses workers and keeps their load. The twin below is the whole brain of a single front.

    Several fronts share one in a process of its own, see `router.brain`.
    """

    async def place(self, query: PlaceQuery) -> Choice:
        """Chooses and charges workers for a new attempt, when its turn comes.

        A cancelled call leaves nothing behind: no place among those that wait, no charge.

        Raises:
            TooLate: its first token would come too late.
            NoWorker: none now.
            NoBrain: nobody can say.
            TooLong: none ever.
        """
        ...

    async def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> Choice:
        """Chooses and charges another decode worker for KV held by `prefill`; raises as `place`."""
        ...

    def finish_prefill(self, request_id: RequestId, worker: WorkerKey) -> None:
        """Notes that a prompt is computed."""
        ...

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Notes that nobody but these works for a request."""
        ...

    def note_cached(self, worker: WorkerKey, granules: Sequence[int]) -> None:
        """Notes that a worker now holds a prefix."""
        ...

    def forget(self, worker: WorkerKey) -> None:
        """Drops what a dead worker held."""
        ...

    def note_output(self, num_tokens: int) -> None:
        """Takes the length of an output that has ended: others will be like it."""
        ...


class InProcessPlacer:
    """Places over this process's own fleet, book and index."""

    def __init__(
        self,
        policy: Policy,
        book: LoadBook,
        index: PrefixIndex,
        clock: Clock,
        max_local_tokens: int = 0,
        table: LawTable | None = None,
        room: Room | None = None,
    ) -> None:
        """Takes the parts it works on; it alone writes the index.

        Args:
            policy: chooses.
            book: takes the charges.
            index: who holds which prefix.
            clock: the time of choices.
            max_local_tokens: uncached tokens that a decode worker may prefill; 0: none.
            table: predicts waits before a turn; None: nobody is refused for them.
            room: where turns are waited for; None: nobody waits.
        """
        self._policy = policy
        self._book = book
        self._index = index
        self._clock = clock
        self._max_local_tokens = max_local_tokens
        self._table = table
        self._room = room
        self._mean_output_tokens = FIRST_GUESS_TOKENS

    async def place(self, query: PlaceQuery) -> Choice:
        """Chooses a pair by what it should cost as of this instant."""
        return (await self.place_and_tell(query)).choice

    async def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> Choice:
        """Chooses the cheapest decode worker of the prefill worker's group."""
        return self.place_decode_and_tell(query, prefill).choice

    async def place_and_tell(self, query: PlaceQuery) -> Placed:
        """Does what `place` does, and tells what was charged."""
        if query.waits_for_turn and self._room is not None:
            query = await self._wait_for_turn(query, self._room)
        # From here on nothing is awaited: the next one whose turn comes must find this one charged.
        demand = self._demand(query)
        choice = self._policy.choose(demand, self._clock.now())
        if query.ttft_slo_s is not None and choice.table.is_in_seconds:
            _check_ttft(choice.expected.first_token, query.ttft_slo_s)
        computes = choice.prefill or choice.decode
        uncached = max(demand.num_tokens - choice.cached_tokens, 1)
        terms = prefill_terms(uncached, choice.cached_tokens)
        self._book.charge_prefill(query.request_id, computes, terms)
        if choice.prefill is not None:
            self.note_cached(choice.prefill, query.granules)
            self._book.charge_link(choice.prefill, choice.transfer_s)
        return self._charge_decode(query, demand, choice, terms)

    def place_decode_and_tell(self, query: PlaceQuery, prefill: WorkerKey) -> Placed:
        """Does what `place_decode` does, and tells what was charged."""
        demand = self._demand(query)
        choice = self._policy.choose_decode(demand, prefill, self._clock.now())
        return self._charge_decode(query, demand, choice, None)

    def finish_prefill(self, request_id: RequestId, worker: WorkerKey) -> None:
        """Takes a prompt off the book."""
        self._book.finish_prefill(request_id, worker)

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Releases what others were charged."""
        self._book.keep_only(request_id, workers)

    async def _wait_for_turn(self, query: PlaceQuery, room: Room) -> PlaceQuery:
        """Returns the request as it is when its turn has come: it has less time left."""
        asked_s = self._clock.now()
        self._check_wait(query, room.tokens_before(query.priority))
        turn = Turn(tenant=query.tenant, priority=query.priority, cost=self._expect_uncached(query))
        await room.wait_for_turn(turn, has_prefill_pool=query.has_prefill_pool)
        if query.ttft_slo_s is None:
            return query
        return replace(query, ttft_slo_s=query.ttft_slo_s - (self._clock.now() - asked_s))

    def _expect_uncached(self, query: PlaceQuery) -> int:
        """Returns what the worker with the longest prefix has not."""
        cached = max(self._index.match(query.granules).values(), default=0) * GRANULE_TOKENS
        return max(query.num_tokens - cached, 1)

    def _check_wait(self, query: PlaceQuery, num_tokens_before: int) -> None:
        """Checks the time that those before it take; nothing is refused while it is not known."""
        if query.ttft_slo_s is None or not num_tokens_before or self._table is None:
            return
        role = Role.PREFILL if query.has_prefill_pool else Role.DECODE
        wait_s = self._table.drain_s(num_tokens_before, role, self._clock.now())
        if wait_s is not None:
            _check_ttft(wait_s, query.ttft_slo_s)

    def note_cached(self, worker: WorkerKey, granules: Sequence[int]) -> None:
        """Adds to the index."""
        self._index.add(worker.worker_id, granules)

    def forget(self, worker: WorkerKey) -> None:
        """Drops a worker from the index."""
        self._index.forget(worker.worker_id)

    def note_output(self, num_tokens: int) -> None:
        """Lets the mean follow."""
        self._mean_output_tokens += OUTPUT_WEIGHT * (num_tokens - self._mean_output_tokens)

    def _charge_decode(
        self, query: PlaceQuery, demand: Demand, choice: Choice, prompt: Terms | None
    ) -> Placed:
        decode = choice.decode
        size = self._book.fleet.block_size_of(decode)
        prompt_blocks = -(-demand.num_tokens // size)
        growth_blocks = -(-(demand.num_tokens + demand.num_growth_tokens) // size) - prompt_blocks
        half = demand.num_expected_tokens // 2
        charge = DecodeCharge(
            num_seqs=1, kv_tokens=demand.num_tokens + half, blocks=prompt_blocks + growth_blocks
        )
        follower = DecodeCharge(num_seqs=1, kv_tokens=half, blocks=growth_blocks)
        self._book.charge_decode(query.request_id, decode, charge)
        for request_id in query.followers:
            self._book.charge_decode(request_id, decode, follower)
        self.note_cached(decode, query.granules)
        self._book.charge_link(decode, choice.transfer_s)
        return Placed(choice=choice, prompt=prompt, decode=charge, follower=follower)

    def _demand(self, query: PlaceQuery) -> Demand:
        rows, tokens = [], []
        for worker_id, count in self._index.match(query.granules).items():
            row = self._book.fleet.row_of_id(worker_id)
            if row is not None:
                rows.append(row)
                tokens.append(count * GRANULE_TOKENS)
        return Demand(
            num_tokens=query.num_tokens,
            num_growth_tokens=query.num_growth_tokens,
            num_expected_tokens=min(query.num_growth_tokens, round(self._mean_output_tokens)),
            num_samples=1 + len(query.followers),
            cached_rows=np.array(rows, dtype=np.int64),
            cached_tokens=np.array(tokens, dtype=np.int64),
            max_local_tokens=self._max_local_tokens if query.may_be_local else 0,
            has_prefill_pool=query.has_prefill_pool,
            tpot_slo_s=query.tpot_slo_s,
            ttft_slo_s=query.ttft_slo_s,
            excluded=query.excluded,
        )


def _check_ttft(predicted_s: float, left_s: float) -> None:
    if predicted_s <= left_s:
        return
    raise TooLate(
        f"the first token would come in {predicted_s:.3g} s, of the time wanted for it "
        f"{max(left_s, 0):.3g} s are left",
        retry_after_s=max(predicted_s - left_s, MIN_RETRY_S),
    )
