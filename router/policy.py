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
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pdserve.errors import NoWorker, TooLong
from pdserve.request import Role
from router.candidates import Candidate, CandidateTable, Path
from router.cost import Laws, LawTable, prefill_cost, share_to_free, stall_of
from router.fleet import Fleet, FloatArray, IntArray
from router.scores import Cached, Scores, decode_load
from router.ways import (
    MISSED_WEIGHT,
    Receiver,
    Sender,
    Way,
    best_ways,
    local_way,
    pair_ways,
    shorten,
)
from router.worker_key import WorkerKey as WorkerKey

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
        self._scores = Scores(fleet, table)

    def choose(self, demand: Demand, now_s: float) -> Choice:
        """Chooses by the least cost over both paths, see `Policy`."""
        asked = self._ask(demand, now_s)
        far_own = self._decode_bound(asked)
        far = self._receivers(asked, far_own)
        ways = self._local_ways(asked, far, far_own)
        # In blocks the two paths cannot be compared: a short rest stays where it is cached.
        if demand.has_prefill_pool and (asked.laws.is_fitted or not ways):
            near_own = self._prompt_bound(asked)
            near = self._senders(asked, near_own)
            if near:
                ways += self._pairs(asked, near, near_own, far, far_own)
            elif not ways:
                raise NoWorker("no prefill worker is available")
        if not ways:
            raise NoWorker("no prefill worker has a compatible decode worker")
        return self._pick(ways, asked)

    def choose_decode(self, demand: Demand, prefill: WorkerKey, now_s: float) -> Choice:
        """Chooses by what is left: the hand-off, the wait for room, the step."""
        fleet = self._fleet
        row = fleet.row_of(prefill)
        if row is None:
            raise NoWorker(f"worker {prefill.worker_id} is gone")
        asked = self._ask(demand, now_s)
        own = self._decode_bound(asked)
        own[fleet.group != fleet.group[row]] = np.inf
        far = self._receivers(asked, own)
        one = self._scores.standing(row)
        computed = Sender(
            row=row,
            queue=0.0,
            time=0.0,
            stall=0.0,
            num_chunks=1.0,
            extra=0.0,
            fixed=one.transfer_fixed,
            per_byte=one.transfer_per_byte,
            link_until_s=one.link_until_s,
        )
        ways = pair_ways([computed], far, now_s, is_fitted=asked.laws.is_fitted)
        return self._pick(ways, asked)

    def _ask(self, demand: Demand, now_s: float) -> "_Asked":
        fleet, laws = self._fleet, self._scores.refresh(now_s)
        tokens = np.minimum(demand.cached_tokens, float(demand.num_tokens))
        cached = np.zeros(fleet.capacity)
        cached[demand.cached_rows] = tokens
        excluded = [fleet.row_of(key) for key in demand.excluded]
        slo_s = demand.ttft_slo_s if laws.is_fitted else None
        return _Asked(
            demand=demand,
            now_s=now_s,
            laws=laws,
            found=(demand.cached_rows, tokens),
            cached=cached,
            excluded=[row for row in excluded if row is not None],
            ttft_slo_s=math.inf if slo_s is None else slo_s,
        )

    def _prompt_bound(self, asked: "_Asked") -> FloatArray:
        demand = asked.demand
        own = self._scores.prompt_bound(asked.laws, demand.num_tokens, asked.found, asked.now_s)
        own += self._scores.bias[Role.PREFILL]
        if asked.excluded:
            own[asked.excluded] = np.inf
        return own

    def _decode_bound(self, asked: "_Asked") -> FloatArray:
        demand, laws, scores = asked.demand, asked.laws, self._scores
        # Without the predictor, blocks that are cached are not to be filled.
        added = demand.num_kv_tokens if laws.is_fitted else float(demand.num_tokens)
        load = demand.num_samples, added
        own = scores.decode_bound(laws, demand.num_tokens, asked.found, load)
        if not demand.has_prefill_pool and laws.is_fitted:
            # Whoever decodes computes the prompt as well.
            own += scores.prompt_bound(laws, demand.num_tokens, asked.found, asked.now_s)
        own += scores.bias[Role.DECODE]
        if asked.excluded:
            own[asked.excluded] = np.inf
        return own

    def _senders(self, asked: "_Asked", own: FloatArray) -> list[Sender]:
        """Returns the best few."""
        fleet = self._fleet
        rows = shorten(own)
        if fleet.are_silent(rows, asked.now_s).any():
            rows = shorten(np.where(fleet.are_silent(slice(None), asked.now_s), np.inf, own))
        rate = self._scores.rate
        return [self._send(asked, row, rate) for row in rows.tolist()]

    def _send(self, asked: "_Asked", row: int, rate: float) -> Sender:
        one = self._scores.standing(row)
        queue, (uncached, cached) = one.queue(asked.now_s), asked.prompt_at(row)
        time = prefill_cost(one.prefill, uncached, cached)
        late = max(queue + time - asked.ttft_slo_s, 0.0)
        return Sender(
            row=row,
            queue=queue,
            time=time,
            stall=stall_of(time, queue, rate),
            num_chunks=float(math.ceil(uncached / one.chunk_tokens)),
            extra=one.tie + MISSED_WEIGHT * late,
            fixed=one.transfer_fixed,
            per_byte=one.transfer_per_byte,
            link_until_s=one.link_until_s,
        )

    def _receivers(self, asked: "_Asked", own: FloatArray) -> list[Receiver]:
        """Returns the best few: by the bound if that says it all of them, else by all that counts.

        Raises:
            NoWorker: there is none.
            TooLong: none can ever hold the request.
        """
        rows = shorten(own)
        receivers = [self._receive(asked, row) for row in rows.tolist()]
        if receivers and not any(one.wait or one.missed for one in receivers):
            fits = self._fleet.room_tokens[rows] >= asked.max_tokens
            if fits.all() and not self._fleet.are_silent(rows, asked.now_s).any():
                return receivers
        rows = shorten(self._full_cost(asked, own))
        return [self._receive(asked, row) for row in rows.tolist()]

    def _receive(self, asked: "_Asked", row: int) -> Receiver:
        demand, one = asked.demand, self._scores.standing(row)
        uncached = demand.num_tokens - asked.cached.item(row)
        is_fitted = asked.laws.is_fitted
        added = demand.num_kv_tokens if is_fitted else uncached
        step = one.step + one.per_sequence * demand.num_samples + one.per_kv_token * added
        wait = missed = 0.0
        if is_fitted:
            if one.seqs + demand.num_samples > one.room_seqs or (
                one.kv_tokens + added > one.room_tokens
            ):
                load, need = (one.seqs, one.kv_tokens), (demand.num_samples, added)
                share = share_to_free(load, need, (one.room_seqs, one.room_tokens))
                wait = float(share) * step * demand.num_expected_tokens
            if demand.tpot_slo_s is not None:
                missed = max(step - demand.tpot_slo_s, 0.0)
        return Receiver(
            row=row,
            num_bytes=uncached * one.kv_bytes_per_token,
            step=step,
            wait=wait,
            missed=missed,
            extra=one.tie + MISSED_WEIGHT * missed,
            link_until_s=one.link_until_s,
        )

    def _full_cost(self, asked: "_Asked", own: FloatArray) -> FloatArray:
        """Returns all costs, with what bounds leave out; raises as `_receivers`."""
        fleet, demand, laws = self._fleet, asked.demand, asked.laws
        own = np.where(fleet.are_silent(slice(None), asked.now_s), np.inf, own)
        usable = np.flatnonzero(own < np.inf)
        if not len(usable):
            raise NoWorker("no decode worker is available")
        fits = fleet.room_tokens >= asked.max_tokens
        if not fits[usable].any():
            raise _too_long(fleet, usable, demand)
        own[~fits] = np.inf
        if not laws.is_fitted:
            return own
        load = decode_load(fleet, laws)
        need = demand.num_samples, demand.num_kv_tokens
        _, per_sequence, per_kv_token = laws.decode
        step = self._scores.step + laws.spread(per_sequence * need[0] + per_kv_token * need[1])
        room = fleet.max_num_seqs, fleet.room_tokens
        own += step * demand.num_expected_tokens * share_to_free(load, need, room)
        if demand.tpot_slo_s is not None:
            own += MISSED_WEIGHT * np.maximum(step - demand.tpot_slo_s, 0.0)
        return own

    def _local_ways(self, asked: "_Asked", far: list[Receiver], own: FloatArray) -> list[Way]:
        """Returns the ways of those that may compute the prompt, or its rest, and decode."""
        demand = asked.demand
        if demand.has_prefill_pool and not demand.max_local_tokens:
            return []
        if demand.has_prefill_pool and demand.num_tokens > demand.max_local_tokens:
            rows, tokens = asked.found
            rows = rows[demand.num_tokens - tokens <= demand.max_local_tokens]
            if not len(rows):
                return []
            near = np.full(len(own), np.inf)
            near[rows] = own[rows]
            try:
                far = self._receivers(asked, near)
            except (NoWorker, TooLong):
                return []
        return [
            self._local_way(asked, one)
            for one in far
            if not demand.has_prefill_pool or self._scores.standing(one.row).knows_prefill
        ]

    def _local_way(self, asked: "_Asked", receiver: Receiver) -> Way:
        one = self._scores.standing(receiver.row)
        return local_way(
            one,
            receiver,
            one.queue(asked.now_s),
            asked.prompt_at(receiver.row),
            self._scores.rate,
            asked.ttft_slo_s,
            is_fitted=asked.laws.is_fitted,
        )

    def _pairs(
        self,
        asked: "_Asked",
        near: list[Sender],
        near_own: FloatArray,
        far: list[Receiver],
        far_own: FloatArray,
    ) -> list[Way]:
        """Pairs workers of one geometry: the best few of each side, or of each side's geometry."""
        fleet, now_s, is_fitted = self._fleet, asked.now_s, asked.laws.is_fitted
        if fleet.num_groups == 1:
            return pair_ways(near, far, now_s, is_fitted=is_fitted)
        ways: list[Way] = []
        for group in range(fleet.num_groups):
            others = fleet.group != group
            near = self._senders(asked, np.where(others, np.inf, near_own))
            try:
                far = self._receivers(asked, np.where(others, np.inf, far_own))
            except (NoWorker, TooLong):
                continue
            ways += pair_ways(near, far, now_s, is_fitted=is_fitted)
        return ways

    def _pick(self, ways: list[Way], asked: "_Asked") -> Choice:
        keys = self._fleet.keys
        best = best_ways(ways)
        pairs = tuple(
            [
                (None if way.computes == way.decodes else keys[way.computes], keys[way.decodes])
                for way in best
            ]
        )
        first, (prefill, decode) = best[0], pairs[0]
        num_cached = int(asked.cached[first.computes])
        return Choice(
            prefill=prefill,
            decode=decode,
            path="local" if prefill is None else "disaggregated",
            cached_tokens=num_cached,
            cached_blocks=int(num_cached // self._fleet.block_size[first.computes]),
            table=CandidateTable(
                is_in_seconds=asked.laws.is_fitted,
                terms=np.array([way.terms for way in best]),
                pairs=pairs,
            ),
            transfer_s=first.transfer if asked.laws.is_fitted else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """One choice to be made."""

    demand: Demand
    now_s: float
    laws: Laws
    found: Cached
    cached: FloatArray
    """The tokens of the prompt that each row has."""
    excluded: list[int]
    ttft_slo_s: float

    @property
    def max_tokens(self) -> int:
        """That it may come to hold; workers hold whole blocks, so tokens can be compared."""
        return self.demand.num_tokens + self.demand.num_growth_tokens

    def prompt_at(self, row: int) -> tuple[float, float]:
        """Returns the tokens to be computed by a worker, and those that it has cached."""
        cached = self.cached.item(row)
        return max(self.demand.num_tokens - cached, 1.0), cached


def _too_long(fleet: Fleet, rows: IntArray, demand: Demand) -> TooLong:
    largest = int(fleet.total_blocks[rows].max())
    size = int(fleet.block_size[rows].max())
    need = -(-(demand.num_tokens + demand.num_growth_tokens) // size)
    return TooLong("prompt", need, f"at most {largest} KV blocks with its output")
