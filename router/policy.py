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

from collections.abc import Collection
from dataclasses import dataclass, field
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
from router.fleet import Fleet, FloatArray, IntArray
from router.ways import DecodeSide, PromptSide, Ways, join_ways, local_ways, pair_ways
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
    link_until_s: float | None = None
    """Until when the hand-off keeps both links; None while nothing is predicted."""

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
        cached = self._cached(demand)
        side = self._decode_side(demand, cached, laws, now_s)
        ways = []
        local = _near(side, demand, laws) if demand.has_prefill_pool else side
        if len(local.rows):
            ways.append(local_ways(fleet, laws, local, now_s))
        # In blocks the two paths cannot be compared: a short rest stays where it is cached.
        if demand.has_prefill_pool and (laws.is_fitted or not ways):
            rows = fleet.usable(Role.PREFILL, demand.excluded, now_s)
            if len(rows):
                prompt = self._prompt_side(rows, demand, cached, laws, now_s)
                ways += self._pairs(prompt, side, laws, now_s)
            elif not ways:
                raise NoWorker("no prefill worker is available")
        if not ways:
            raise NoWorker("no prefill worker has a compatible decode worker")
        return self._pick(join_ways(ways), cached, laws, now_s)

    def choose_decode(self, demand: Demand, prefill: WorkerKey, now_s: float) -> Choice:
        """Chooses by what is left: the hand-off, the wait for room, the step."""
        fleet, laws = self._fleet, self._table.laws(now_s)
        row = fleet.row_of(prefill)
        if row is None:
            raise NoWorker(f"worker {prefill.worker_id} is gone")
        cached = self._cached(demand)
        side = self._decode_side(demand, cached, laws, now_s, fleet.group[row])
        none = np.zeros(1)
        computed = PromptSide(
            rows=np.array([row]), queue=none, time=none, num_chunks=np.ones(1), tie=none
        )
        return self._pick(pair_ways(fleet, laws, computed, side, now_s), cached, laws, now_s)

    def _decode_side(
        self,
        demand: Demand,
        cached: FloatArray,
        laws: Laws,
        now_s: float,
        group: int | None = None,
    ) -> DecodeSide:
        fleet = self._fleet
        rows = fleet.usable(Role.DECODE, demand.excluded, now_s)
        if group is not None:
            rows = rows[fleet.group[rows] == group]
        if not len(rows):
            raise NoWorker("no decode worker is available")
        rows = _that_fit(fleet, rows, demand)
        uncached = demand.num_tokens - cached[rows]
        seqs, kv_tokens = load = decode_load(fleet, laws, rows)
        added = demand.num_kv_tokens if laws.is_fitted else uncached
        step = step_cost(laws, rows, seqs + demand.num_samples, kv_tokens + added)
        wait = missed = np.zeros(len(rows))
        if laws.is_fitted:
            need = (demand.num_samples, demand.num_kv_tokens)
            wait = room_wait_s(fleet, rows, need, load, step * demand.num_expected_tokens)
            if demand.tpot_slo_s is not None:
                missed = np.maximum(step - demand.tpot_slo_s, 0.0)
        num_bytes = uncached * fleet.kv_bytes_per_token[rows]
        return DecodeSide(
            rows=rows,
            uncached=uncached,
            cached=cached[rows],
            num_bytes=num_bytes,
            seqs=seqs,
            step=step,
            wait=wait,
            missed=missed,
            transfer=num_bytes * laws.transfer[1].max(),
            tie=self._tie(rows),
        )

    def _prompt_side(
        self, rows: IntArray, demand: Demand, cached: FloatArray, laws: Laws, now_s: float
    ) -> PromptSide:
        fleet = self._fleet
        uncached = np.maximum(demand.num_tokens - cached[rows], 1.0)
        return PromptSide(
            rows=rows,
            queue=queue_cost(fleet, laws, rows, now_s),
            time=prefill_cost(laws, rows, uncached, cached[rows]),
            num_chunks=np.ceil(uncached / fleet.chunk_tokens[rows]),
            tie=self._tie(rows),
        )

    def _pairs(self, prompt: PromptSide, side: DecodeSide, laws: Laws, now_s: float) -> list[Ways]:
        fleet = self._fleet
        near, far = fleet.group[prompt.rows], fleet.group[side.rows]
        if (near == near[0]).all() and (far == near[0]).all():
            return [pair_ways(fleet, laws, prompt, side, now_s)]
        return [
            pair_ways(
                fleet,
                laws,
                prompt.part(np.flatnonzero(near == group)),
                side.part(np.flatnonzero(far == group)),
                now_s,
            )
            for group in np.intersect1d(near, far)
        ]

    def _cached(self, demand: Demand) -> FloatArray:
        cached = np.zeros(self._fleet.capacity)
        if len(demand.cached_rows):
            cached[demand.cached_rows] = np.minimum(demand.cached_tokens, demand.num_tokens)
        return cached

    def _tie(self, rows: IntArray) -> FloatArray:
        """Returns something small that is larger for who was picked later."""
        tie: FloatArray = self._fleet.last_pick[rows] * (_TIE / (self._fleet.num_picks + 1))
        return tie

    def _pick(self, ways: Ways, cached: FloatArray, laws: Laws, now_s: float) -> Choice:
        member, best = self._fleet.member, ways.best()
        rows = zip(ways.computes[best].tolist(), ways.decodes[best].tolist(), strict=True)
        pairs = tuple(
            (None if computes == decode else member(computes).key, member(decode).key)
            for computes, decode in rows
        )
        first = best[0]
        computes = ways.computes[first]
        prefill, decode = pairs[0]
        return Choice(
            prefill=prefill,
            decode=decode,
            path="local" if prefill is None else "disaggregated",
            cached_tokens=int(cached[computes]),
            cached_blocks=int(cached[computes] // self._fleet.block_size[computes]),
            table=CandidateTable(
                is_in_seconds=laws.is_fitted, terms=ways.terms[:, best].T, pairs=pairs
            ),
            link_until_s=now_s + float(ways.link_until[first]) if laws.is_fitted else None,
        )


def _that_fit(fleet: Fleet, rows: IntArray, demand: Demand) -> IntArray:
    need = np.ceil((demand.num_tokens + demand.num_growth_tokens) / fleet.block_size[rows])
    total = fleet.total_blocks[rows]
    fits = need <= total
    if fits.all():
        return rows
    if not fits.any():
        limit = f"at most {int(total.max())} KV blocks with its output"
        raise TooLong("prompt", int(need.min()), limit)
    fitting: IntArray = rows[fits]
    return fitting


def _near(side: DecodeSide, demand: Demand, laws: Laws) -> DecodeSide:
    """Returns the decode workers that may prefill the rest themselves."""
    if not demand.max_local_tokens:
        return side.part(_NO_ROWS)
    is_near = (side.uncached <= demand.max_local_tokens) & laws.knows_prefill[side.rows]
    return side.part(np.flatnonzero(is_near))
