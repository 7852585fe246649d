"""Where requests go in a simulation: the seam for policies, and the one of production behind it."""

from collections.abc import Collection, Sequence
from typing import Protocol

from pdserve.request import RequestId, Role
from router.load_book import LoadBook
from router.placer import PlaceQuery
from router.policy import Choice, Demand, WorkerKey, WorkerView, choose_decode, choose_pair
from router.prefix_index import GRANULE_TOKENS, PrefixIndex


class RoutingPolicy(Protocol):
    """Chooses workers, and is told what becomes of its choices."""

    def join(self, worker: WorkerKey, role: Role, total_blocks: int) -> None:
        """A worker takes requests from now on."""
        ...

    def leave(self, worker: WorkerKey) -> None:
        """A worker is gone, and all that it held."""
        ...

    def place(self, query: PlaceQuery) -> Choice:
        """Chooses and charges workers for a new attempt.

        Raises:
            NoWorker: none now.
            TooLong: none ever.
        """
        ...

    def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> WorkerKey:
        """Chooses and charges another decode worker for KV held by `prefill`; raises as `place`."""
        ...

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Only these still work for a request."""
        ...


class BlockCosts:
    """Production's choice by cost in KV blocks, over the production load book and prefix index."""

    def __init__(self, block_size: int, max_local_tokens: int = 0) -> None:
        """Knows no worker.

        Args:
            block_size: tokens of a KV block.
            max_local_tokens: uncached tokens that a decode worker may prefill; 0: none.
        """
        self._block_size = block_size
        self._max_local_blocks = max_local_tokens // block_size
        self._book = LoadBook()
        self._index = PrefixIndex(max_keys=1 << 20)
        self._facts: dict[WorkerKey, tuple[Role, int]] = {}
        self._views: dict[WorkerKey, WorkerView] = {}
        self._charged: dict[RequestId, set[WorkerKey]] = {}

    def join(self, worker: WorkerKey, role: Role, total_blocks: int) -> None:
        """Adds a worker."""
        self._facts[worker] = (role, total_blocks)
        self._refresh((worker,))

    def leave(self, worker: WorkerKey) -> None:
        """Drops a worker."""
        self._facts.pop(worker, None)
        self._views.pop(worker, None)
        self._book.forget(worker)
        self._index.forget(worker.worker_id)

    def place(self, query: PlaceQuery) -> Choice:
        """Chooses the cheapest pair."""
        demand = self._demand(query)
        has_prefill_pool = any(role is Role.PREFILL for role, _ in self._facts.values())
        choice = choose_pair(
            tuple(self._views.values()),
            demand,
            query.excluded,
            has_prefill_pool=has_prefill_pool,
        )
        if choice.prefill is not None:
            blocks = max(demand.prompt_blocks - choice.cached_blocks, 1)
            self._charge(query, choice.prefill, blocks)
        self._charge(query, choice.decode, demand.prompt_blocks + demand.growth_blocks)
        return choice

    def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> WorkerKey:
        """Chooses the cheapest other decode worker."""
        demand = self._demand(query)
        decode = choose_decode(tuple(self._views.values()), demand, b"", query.excluded)
        self._charge(query, decode, demand.prompt_blocks + demand.growth_blocks)
        return decode

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Releases the charges of the others."""
        self._book.keep_only(request_id, workers)
        charged = self._charged.get(request_id, set())
        self._refresh(charged)
        if workers:
            self._charged[request_id] = charged & set(workers)
        else:
            self._charged.pop(request_id, None)

    def _charge(self, query: PlaceQuery, worker: WorkerKey, blocks: int) -> None:
        self._book.charge(query.request_id, worker, blocks)
        self._charged.setdefault(query.request_id, set()).add(worker)
        self._index.add(worker.worker_id, query.granules)
        self._refresh((worker,))

    def _refresh(self, workers: Collection[WorkerKey]) -> None:
        for worker in workers:
            if worker not in self._facts:
                continue
            role, total_blocks = self._facts[worker]
            self._views[worker] = WorkerView(
                key=worker,
                role=role,
                is_available=True,
                compatibility_digest=b"",
                load_blocks=self._book.blocks_of(worker),
                total_blocks=total_blocks,
                last_picked=self._book.last_pick_of(worker),
            )

    def _demand(self, query: PlaceQuery) -> Demand:
        size = self._block_size
        prompt_blocks = -(-query.num_tokens // size)
        all_blocks = -(-(query.num_tokens + query.num_growth_tokens) // size)
        matches = self._index.match(query.granules)
        return Demand(
            prompt_blocks=prompt_blocks,
            growth_blocks=all_blocks - prompt_blocks,
            cached_blocks={
                key: count * max(GRANULE_TOKENS // size, 1) for key, count in matches.items()
            },
            max_local_blocks=self._max_local_blocks if query.may_be_local else 0,
        )
