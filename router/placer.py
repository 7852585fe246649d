"""Where a request goes: the seam between a front and the brain that knows the cluster."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.request import RequestId
from router.policy import Choice, Demand, WorkerKey, choose_decode, choose_pair
from router.prefix_index import GRANULE_TOKENS, PrefixIndex
from router.worker_pool import WorkerPool


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


class Placer(Protocol):
    """Chooses workers. The in-process twin below is the whole brain of a single front."""

    async def place(self, query: PlaceQuery) -> Choice:
        """Chooses and charges workers for a new attempt.

        Raises:
            NoWorker: none now.
            TooLong: none ever.
        """
        ...

    async def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> WorkerKey:
        """Chooses and charges another decode worker for KV held by `prefill`; raises as `place`."""
        ...

    def note_cached(self, worker: WorkerKey, granules: Sequence[int]) -> None:
        """Notes that a worker now holds a prefix."""
        ...

    def forget(self, worker: WorkerKey) -> None:
        """Drops what a dead worker held."""
        ...


class InProcessPlacer:
    """Places over this process's own pool, book and index."""

    def __init__(
        self, pool: WorkerPool, index: PrefixIndex, block_size: int, max_local_tokens: int = 0
    ) -> None:
        """Takes the parts it reads; it alone writes the index.

        Args:
            pool: the workers.
            index: who holds which prefix.
            block_size: tokens of a KV block.
            max_local_tokens: uncached tokens that a decode worker may prefill; 0: none.
        """
        self._pool = pool
        self._index = index
        self._block_size = block_size
        self._max_local_blocks = max_local_tokens // block_size

    async def place(self, query: PlaceQuery) -> Choice:
        """Chooses a pair by prefix affinity and load, as of this instant."""
        demand = self._demand(query)
        choice = choose_pair(
            self._pool.views(),
            demand,
            query.excluded,
            has_prefill_pool=self._pool.has_prefill_pool,
        )
        book = self._pool.book
        if choice.prefill is not None:
            blocks = max(demand.prompt_blocks - choice.cached_blocks, 1)
            book.charge(query.request_id, choice.prefill, blocks)
            self.note_cached(choice.prefill, query.granules)
        self._charge_decode(query, demand, choice.decode)
        return choice

    async def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> WorkerKey:
        """Chooses the least loaded decode worker of the prefill worker's group."""
        demand = self._demand(query)
        digest = self._pool.link(prefill).record.compatibility_digest
        decode = choose_decode(self._pool.views(), demand, digest, query.excluded)
        self._charge_decode(query, demand, decode)
        return decode

    def note_cached(self, worker: WorkerKey, granules: Sequence[int]) -> None:
        """Adds to the index."""
        self._index.add(worker.worker_id, granules)

    def forget(self, worker: WorkerKey) -> None:
        """Drops a worker from the index."""
        self._index.forget(worker.worker_id)

    def _charge_decode(self, query: PlaceQuery, demand: Demand, decode: WorkerKey) -> None:
        blocks = demand.prompt_blocks + demand.growth_blocks
        self._pool.book.charge(query.request_id, decode, blocks)
        for request_id in query.followers:
            self._pool.book.charge(request_id, decode, demand.growth_blocks)
        self.note_cached(decode, query.granules)

    def _demand(self, query: PlaceQuery) -> Demand:
        size = self._block_size
        prompt_blocks = -(-query.num_tokens // size)
        all_blocks = -(-(query.num_tokens + query.num_growth_tokens) // size)
        granule_blocks = max(GRANULE_TOKENS // size, 1)
        matches = self._index.match(query.granules)
        return Demand(
            prompt_blocks=prompt_blocks,
            growth_blocks=all_blocks - prompt_blocks,
            cached_blocks={key: count * granule_blocks for key, count in matches.items()},
            max_local_blocks=self._max_local_blocks if query.may_be_local else 0,
        )
