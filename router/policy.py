"""Which workers take a request, and by which path: the least predicted time, chosen jointly.

    filter   alive, not draining, not excluded, able to hold the request, of one compatibility group
    shorten  the best few of each side by their own term
    pair     queue + prefill + what is not hidden of hand-off and of waiting for room + decode steps
             + what others lose while all are busy; or local: the decode worker computes the prompt
             itself, at the cost of those it serves
    pick     the cheapest that keeps the wanted time per token, else the one that misses it least;
             ties go to the worker picked longest ago

All terms have one unit, so affinity yields as soon as the queue in front of the cached prefix is
longer than the prefix is worth: seconds, or KV blocks while the predictor is not fitted (`cost`).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from pdserve.errors import NoWorker, TooLong
from pdserve.request import Role
from router.candidates import Candidate, CandidateTable, Pairs, Path
from router.cost import Laws, LawTable, share_to_free
from router.fleet import Fleet, FloatArray, IntArray
from router.scores import Ask, Cached, Scores, decode_load
from router.ways import (
    LOCAL_LIST,
    MISSED_WEIGHT,
    SHORT_LIST,
    Near,
    Receiver,
    Sides,
    Way,
    all_pairs,
    best_pair,
    local_way,
    make_receiver,
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
        return self.table.chosen()


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
        look = self._look(demand, now_s)
        far_own = self._decode_bound(look)
        far = self._receivers(look, far_own)
        local = self._local_ways(look, far, far_own)
        sides: list[Sides] = []
        # In blocks the two paths cannot be compared: a short rest stays where it is cached.
        if demand.has_prefill_pool and (look.laws.is_fitted or not local):
            near_own = self._prompt_bound(look)
            near = self._senders(look, near_own)
            if near:
                sides = self._pair_up(look, (near, near_own), (far, far_own))
            elif not local:
                raise NoWorker("no prefill worker is available")
        return self._pick(look, sides, local)

    def choose_decode(self, demand: Demand, prefill: WorkerKey, now_s: float) -> Choice:
        """Chooses by what is left: the hand-off, the wait for room, the steps."""
        fleet = self._fleet
        row = fleet.row_of(prefill)
        if row is None:
            raise NoWorker(f"worker {prefill.worker_id} is gone")
        look = self._look(demand, now_s)
        own = self._decode_bound(look)
        own[fleet.group != fleet.group[row]] = np.inf
        far = self._receivers(look, own)
        computed = self._scores.standing(row).without_prompts(now_s)
        return self._pick(look, [([(0.0, computed, 0.0)], far)], [])

    def _look(self, demand: Demand, now_s: float) -> "_Look":
        fleet, scores = self._fleet, self._scores
        laws = scores.refresh(now_s)
        queue = scores.queue(now_s)
        tokens = np.minimum(demand.cached_tokens, float(demand.num_tokens))
        cached = np.zeros(fleet.capacity)
        cached[demand.cached_rows] = tokens
        tpot_slo_s, ttft_slo_s = demand.tpot_slo_s, demand.ttft_slo_s
        ask = Ask(
            now_s,
            laws.is_fitted,
            scores.crowding(queue, Role.PREFILL if demand.has_prefill_pool else Role.DECODE),
            demand.num_tokens,
            demand.num_samples,
            demand.num_kv_tokens,
            demand.num_expected_tokens,
            math.inf if tpot_slo_s is None else tpot_slo_s,
            math.inf if ttft_slo_s is None or not laws.is_fitted else ttft_slo_s,
        )
        rows = [fleet.row_of(key) for key in demand.excluded]
        excluded = [row for row in rows if row is not None]
        return _Look(ask, demand, laws, queue, (demand.cached_rows, tokens), cached, excluded)

    def _prompt_bound(self, look: "_Look") -> FloatArray:
        own = self._scores.prompt_bound(look.laws, look.ask, look.found, look.queue)
        own += self._scores.bias[Role.PREFILL]
        if look.excluded:
            own[look.excluded] = np.inf
        return own

    def _decode_bound(self, look: "_Look") -> FloatArray:
        own = self._scores.decode_bound(look.laws, look.ask, look.found)
        if not look.demand.has_prefill_pool and look.laws.is_fitted:
            # Whoever decodes computes the prompt as well.
            own += self._scores.prompt_bound(look.laws, look.ask, look.found, look.queue)
        own += self._scores.bias[Role.DECODE]
        if look.excluded:
            own[look.excluded] = np.inf
        return own

    def _senders(self, look: "_Look", own: FloatArray) -> Near:
        """Returns the best few."""
        fleet, now_s = self._fleet, look.ask.now_s
        rows = shorten(own)
        if fleet.is_any_silent(rows, now_s):
            rows = shorten(np.where(fleet.are_silent(slice(None), now_s), np.inf, own))
        standings = [self._scores.standing(row) for row in rows.tolist()]
        return list(zip(own[rows].tolist(), standings, look.cached[rows].tolist(), strict=True))

    def _receivers(
        self,
        look: "_Look",
        own: FloatArray,
        among: IntArray | None = None,
        size: int = SHORT_LIST,
    ) -> list[Receiver]:
        """Returns the best few, by the bound if that says all of them, else by all that counts.

        Args:
            look: the choice.
            own: bounds of all workers.
            among: looks at these alone.
            size: how many are few.

        Raises:
            NoWorker: there is nobody at all.
            TooLong: nobody can ever hold the request.
        """
        rows = _best_rows(own, among, size)
        found = self._receivers_at(look, rows)
        if found and not [one for one in found if one.wait or one.missed]:
            room_tokens, need = self._fleet.room_tokens.item, look.max_tokens
            fit = [row for row in rows.tolist() if room_tokens(row) >= need]
            if len(fit) == len(found) and not self._fleet.is_any_silent(rows, look.ask.now_s):
                return found
        rows = _best_rows(self._full_cost(look, own), among, size)
        return self._receivers_at(look, rows)

    def _receivers_at(self, look: "_Look", rows: IntArray) -> list[Receiver]:
        ask, standing = look.ask, self._scores.standing
        places = zip(rows.tolist(), look.cached[rows].tolist(), strict=True)
        return [make_receiver(ask, standing(row), cached) for row, cached in places]

    def _full_cost(self, look: "_Look", own: FloatArray) -> FloatArray:
        """Returns all costs, with what bounds leave out; raises as `_receivers`."""
        fleet, ask, laws = self._fleet, look.ask, look.laws
        own = np.where(fleet.are_silent(slice(None), ask.now_s), np.inf, own)
        usable = np.flatnonzero(own < np.inf)
        if not len(usable):
            raise NoWorker("no decode worker is available")
        fits = fleet.room_tokens >= look.max_tokens
        if not fits[usable].any():
            raise _too_long(fleet, usable, look.demand)
        own[~fits] = np.inf
        if laws.is_fitted:
            need = ask.num_samples, ask.kv_tokens
            step = self._scores.step_with(laws, *need)
            share = share_to_free(
                decode_load(fleet, laws), need, (fleet.max_num_seqs, fleet.room_tokens)
            )
            own += step * max(ask.life_tokens, 1.0) * share
            own += MISSED_WEIGHT * np.maximum(step - ask.tpot_slo_s, 0.0)
        return own

    def _local_ways(self, look: "_Look", far: list[Receiver], own: FloatArray) -> list[Way]:
        """Returns the ways of those that may compute the prompt, or its rest, and decode."""
        demand = look.demand
        if demand.has_prefill_pool:
            if not demand.max_local_tokens:
                return []
            if demand.num_tokens > demand.max_local_tokens:
                rows, tokens = look.found
                rows = rows[tokens >= demand.num_tokens - demand.max_local_tokens]
                if not len(rows):
                    return []
                far = self._receivers(look, own, rows, LOCAL_LIST)
            far = [one for one in far if self._scores.standing(one.row).knows_prefill]
            if len(far) > LOCAL_LIST:
                far = sorted(far, key=_own_cost)[:LOCAL_LIST]
        return [
            local_way(look.ask, self._scores.standing(one.row), one, look.cached.item(one.row))
            for one in far
        ]

    def _pair_up(
        self, look: "_Look", near: tuple[Near, FloatArray], far: tuple[list[Receiver], FloatArray]
    ) -> list[Sides]:
        """Returns the sides that may be paired: for each geometry, the best few of each side."""
        fleet = self._fleet
        if fleet.num_groups == 1:
            return [(near[0], far[0])]
        sides: list[Sides] = []
        for group in range(fleet.num_groups):
            others = fleet.group != group
            senders = self._senders(look, np.where(others, np.inf, near[1]))
            try:
                receivers = self._receivers(look, np.where(others, np.inf, far[1]))
            except (NoWorker, TooLong):
                continue
            sides.append((senders, receivers))
        return sides

    def _pick(self, look: "_Look", sides: list[Sides], local: list[Way]) -> Choice:
        ask, fleet = look.ask, self._fleet
        ways = [way for side in sides if (way := best_pair(ask, *side)) is not None]
        if not ways and not local:
            raise NoWorker("no prefill worker has a compatible decode worker")
        best, keys = min(ways + local), self._scores.keys
        num_cached = look.cached.item(best.computes)
        pairs = (_pair_of(best, keys),)
        return Choice(
            prefill=pairs[0][0],
            decode=pairs[0][1],
            path="local" if pairs[0][0] is None else "disaggregated",
            cached_tokens=int(num_cached),
            cached_blocks=int(num_cached // fleet.block_size.item(best.computes)),
            table=CandidateTable(
                is_in_seconds=ask.is_fitted,
                terms=np.array((best.terms,)),
                pairs=pairs,
                find_all=partial(_find_all, ask, sides, local, best, keys),
            ),
            transfer_s=best.transfer if ask.is_fitted else None,
        )


@dataclass(slots=True)
class _Look:
    """One choice to be made. Not frozen: that takes longer to make."""

    ask: Ask
    demand: Demand
    laws: Laws
    queue: FloatArray
    found: Cached
    cached: FloatArray
    """The tokens of the prompt that each row has."""
    excluded: list[int]

    @property
    def max_tokens(self) -> int:
        """That it may come to hold; workers hold whole blocks, so tokens can be compared."""
        return self.demand.num_tokens + self.demand.num_growth_tokens


def _find_all(
    ask: Ask, sides: list[Sides], local: list[Way], chosen: Way, keys: tuple[WorkerKey, ...]
) -> tuple[FloatArray, Pairs]:
    """Returns the best ways, the chosen one first."""
    ways = [way for side in sides for way in all_pairs(ask, *side)] + local
    others = sorted(way for way in ways if way[1:3] != chosen[1:3])
    best = [chosen, *others][:SHORT_LIST]
    return np.array([way.terms for way in best]), tuple(_pair_of(way, keys) for way in best)


def _pair_of(way: Way, keys: tuple[WorkerKey, ...]) -> tuple[WorkerKey | None, WorkerKey]:
    is_local = way.computes == way.decodes
    return None if is_local else keys[way.computes], keys[way.decodes]


def _own_cost(one: Receiver) -> float:
    return one.life + one.wait + one.extra


def _best_rows(own: FloatArray, among: IntArray | None, size: int) -> IntArray:
    return shorten(own, size) if among is None else among[shorten(own[among], size)]


def _too_long(fleet: Fleet, rows: IntArray, demand: Demand) -> TooLong:
    largest = int(fleet.total_blocks[rows].max())
    size = int(fleet.block_size[rows].max())
    need = -(-(demand.num_tokens + demand.num_growth_tokens) // size)
    return TooLong("prompt", need, f"at most {largest} KV blocks with its output")
