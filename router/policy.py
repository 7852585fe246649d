"""Which workers take a request, and by which path: the least predicted time, chosen jointly.

    filter   alive, not draining, not excluded, able to hold the request, of one compatibility group
    shorten  the best few of each side by their own term
    pair     queue + prefill + what is not hidden of hand-off and of waiting for room + decode step;
             or local: the decode worker computes the prompt itself, at the cost of those it serves
    pick     the cheapest that keeps the wanted time per token, else the one that misses it least;
             ties go to the worker picked longest ago

All terms have one unit, so affinity yields as soon as the queue in front of the cached prefix is
longer than the prefix is worth: seconds, or KV blocks while the predictor is not fitted (`cost`).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

import numpy as np

from pdserve.errors import NoWorker, TooLong
from pdserve.request import Role
from router.candidates import Candidate, CandidateTable, Path
from router.cost import (
    Laws,
    LawTable,
    decode_load,
    prefill_cost,
    queue_cost,
    room_wait_s,
    step_cost,
)
from router.fleet import BoolArray, Fleet, FloatArray, IntArray
from router.ways import (
    MISSED_WEIGHT,
    SHORT_LIST,
    DecodeSide,
    PromptSide,
    Way,
    local_ways,
    pair_ways,
)
from router.worker_key import WorkerKey as WorkerKey

_TIE = 1e-6
"""Costs that differ by less are equal."""
_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a request asks for, in tokens."""

    num_tokens: int
    """To be in the cache when decoding begins."""
    num_growth_tokens: int = 0
    """Output that may still come, of one sample."""
    num_expected_tokens: int = 0
    """Output that probably comes, of one sample."""
    num_samples: int = 1
    cached_rows: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Of workers that probably have a prefix."""
    cached_tokens: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Its tokens, one number a row."""
    max_local_tokens: int = 0
    """Most uncached tokens that a decode worker may prefill itself; 0: always hand off."""
    has_prefill_pool: bool = True
    """There is, or was, one; without it every prompt is local."""
    tpot_slo_s: float | None = None
    """Wanted seconds per output token."""
    ttft_slo_s: float | None = None
    """Wanted seconds from now to the first token."""
    excluded: Collection[WorkerKey] = ()

    @property
    def num_kv_tokens(self) -> float:
        """Tokens that it will hold on decode, on average over its life."""
        return self.num_tokens + self.num_samples * self.num_expected_tokens // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Workers for one attempt."""

    prefill: WorkerKey | None
    """None: the decode worker prefills by itself."""
    decode: WorkerKey
    path: Path
    cached_tokens: int
    """The prefix hit expected where the prompt is computed."""
    cached_blocks: int
    table: CandidateTable
    transfer_s: float | None = None
    """How long the hand-off takes both links; None while nothing is predicted."""

    @property
    def expected(self) -> Candidate:
        """What it should cost."""
        return self.table.candidate(0)


class Policy(Protocol):
    """Chooses; what was chosen is charged by the caller."""

    def choose(self, demand: Demand, now_s: float) -> Choice:
        """Chooses a prefill and a decode worker, or a decode worker alone.

        Raises:
            NoWorker: none is available now.
            TooLong: no decode worker could ever hold the request.
        """
        ...

    def choose_decode(self, demand: Demand, prefill: WorkerKey, now_s: float) -> Choice:
        """Chooses another decode worker for KV that waits on a prefill worker; raises as `choose`.

        NoWorker also says that the prefill worker is gone.
        """
        ...


class JointPolicy:
    """The policy of this router."""

    def __init__(self, fleet: Fleet, table: LawTable) -> None:
        """Reads both, writes none."""
        self._fleet = fleet
        self._table = table

    def choose(self, demand: Demand, now_s: float) -> Choice:
        """Chooses by the least cost over both paths, see `Policy`."""
        fleet, laws = self._fleet, self._table.laws(now_s)
        cached, tie = self._cached(demand), self._tie()
        queue = queue_cost(fleet, laws, now_s)
        side = self._decode_side(demand, cached, tie, now_s)
        ways: list[Way] = []
        slo_s = math.inf
        if demand.ttft_slo_s is not None and laws.is_fitted:
            slo_s = demand.ttft_slo_s
        local = _local_side(side, queue, demand, laws)
        if local is not None:
            ways += local_ways(fleet, laws, local, queue, demand.num_tokens, slo_s)
        # In blocks the two paths cannot be compared: a short rest stays where it is cached.
        if demand.has_prefill_pool and (laws.is_fitted or not ways):
            usable = fleet.usable(Role.PREFILL, demand.excluded, now_s)
            if usable.any():
                uncached = np.maximum(demand.num_tokens - cached, 1.0)
                time = prefill_cost(laws, uncached, cached)
                own = queue + time
                own += tie
                own[~usable] = np.inf
                prompt = PromptSide(own=own, queue=queue, time=time, uncached=uncached, tie=tie)
                ways += self._pairs(prompt, side, laws, now_s, slo_s)
            elif not ways:
                raise NoWorker("no prefill worker is available")
        if not ways:
            raise NoWorker("no prefill worker has a compatible decode worker")
        return self._pick(ways, cached, laws, now_s)

    def choose_decode(self, demand: Demand, prefill: WorkerKey, now_s: float) -> Choice:
        """Chooses by what is left: the hand-off, the wait for room, the step."""
        fleet, laws = self._fleet, self._table.laws(now_s)
        row = fleet.row_of(prefill)
        if row is None:
            raise NoWorker(f"worker {prefill.worker_id} is gone")
        cached, tie = self._cached(demand), self._tie()
        side = self._decode_side(demand, cached, tie, now_s, fleet.group == fleet.group[row])
        none = np.zeros(fleet.capacity)
        own = np.full(fleet.capacity, np.inf)
        own[row] = 0.0
        computed = PromptSide(own=own, queue=none, time=none, uncached=none + 1.0, tie=none)
        return self._pick(pair_ways(fleet, laws, computed, side, now_s), cached, laws, now_s)

    def _decode_side(
        self,
        demand: Demand,
        cached: FloatArray,
        tie: FloatArray,
        now_s: float,
        is_of_group: BoolArray | None = None,
    ) -> DecodeSide:
        fleet, laws = self._fleet, self._table.laws(now_s)
        usable = fleet.usable(Role.DECODE, demand.excluded, now_s)
        if is_of_group is not None:
            usable &= is_of_group
        if not usable.any():
            raise NoWorker("no decode worker is available")
        usable &= self._that_fit(usable, demand)
        uncached = demand.num_tokens - cached
        seqs, kv_tokens = load = decode_load(fleet, laws)
        added = demand.num_kv_tokens if laws.is_fitted else uncached
        step = step_cost(laws, seqs + demand.num_samples, kv_tokens + added)
        own = step + laws.handoff_per_token * uncached
        own += tie
        wait = missed = np.zeros(fleet.capacity)
        if laws.is_fitted:
            need = (demand.num_samples, demand.num_kv_tokens)
            wait = room_wait_s(fleet, need, load, step * demand.num_expected_tokens)
            own += wait
            if demand.tpot_slo_s is not None:
                missed = np.maximum(step - demand.tpot_slo_s, 0.0)
                own += MISSED_WEIGHT * missed
        own[~usable] = np.inf
        return DecodeSide(
            own=own, uncached=uncached, seqs=seqs, step=step, wait=wait, missed=missed, tie=tie
        )

    def _pairs(
        self, prompt: PromptSide, side: DecodeSide, laws: Laws, now_s: float, slo_s: float
    ) -> list[Way]:
        fleet = self._fleet
        if fleet.num_groups == 1:
            return pair_ways(fleet, laws, prompt, side, now_s, slo_s)
        ways: list[Way] = []
        for group in range(fleet.num_groups):
            others = fleet.group != group
            near = replace(prompt, own=np.where(others, np.inf, prompt.own))
            far = replace(side, own=np.where(others, np.inf, side.own))
            ways += pair_ways(fleet, laws, near, far, now_s, slo_s)
        return ways

    def _cached(self, demand: Demand) -> FloatArray:
        cached = np.zeros(self._fleet.capacity)
        if len(demand.cached_rows):
            cached[demand.cached_rows] = np.minimum(demand.cached_tokens, demand.num_tokens)
        return cached

    def _tie(self) -> FloatArray:
        """Returns something small that is larger for who was picked later."""
        tie: FloatArray = self._fleet.last_pick * (_TIE / (self._fleet.num_picks + 1))
        return tie

    def _that_fit(self, usable: BoolArray, demand: Demand) -> BoolArray:
        fleet = self._fleet
        # A worker holds whole blocks, so tokens can be compared instead of blocks.
        fits: BoolArray = fleet.room_tokens >= demand.num_tokens + demand.num_growth_tokens
        if not (fits & usable).any():
            largest = int(fleet.total_blocks[usable].max())
            size = fleet.block_size[usable].max()
            need = -(-(demand.num_tokens + demand.num_growth_tokens) // int(size))
            raise TooLong("prompt", need, f"at most {largest} KV blocks with its output")
        return fits

    def _pick(self, ways: list[Way], cached: FloatArray, laws: Laws, now_s: float) -> Choice:
        keys = self._fleet.keys
        best = sorted(ways, key=attrgetter("rank"))[:SHORT_LIST]
        pairs = tuple(
            [
                (None if way.computes == way.decodes else keys[way.computes], keys[way.decodes])
                for way in best
            ]
        )
        first, (prefill, decode) = best[0], pairs[0]
        num_cached = int(cached[first.computes])
        return Choice(
            prefill=prefill,
            decode=decode,
            path="local" if prefill is None else "disaggregated",
            cached_tokens=num_cached,
            cached_blocks=int(num_cached // self._fleet.block_size[first.computes]),
            table=CandidateTable(
                is_in_seconds=laws.is_fitted,
                terms=np.array([way.terms for way in best]),
                pairs=pairs,
            ),
            transfer_s=first.transfer if laws.is_fitted else None,
        )


def _local_side(
    side: DecodeSide, queue: FloatArray, demand: Demand, laws: Laws
) -> DecodeSide | None:
    """Returns who may compute the whole prompt, or its rest, and decode; None: nobody."""
    if not demand.has_prefill_pool:
        return replace(side, own=side.own + queue) if laws.is_fitted else side
    if not demand.max_local_tokens:
        return None
    is_near = (side.uncached <= demand.max_local_tokens) & laws.knows_prefill
    own = np.where(is_near, side.own, np.inf)
    return replace(side, own=own) if own.min() < np.inf else None
