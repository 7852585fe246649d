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
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from pdserve.errors import NoWorker, TooLong
from pdserve.request import Role
from router.candidates import Candidate, CandidateTable, Pairs, Path
from router.cost import LawTable
from router.decode_search import DecodeSearch, Look
from router.demand import Demand
from router.fleet import Fleet, FloatArray
from router.scores import Ask, Scores
from router.ways import (
    LOCAL_LIST,
    SHORT_LIST,
    Near,
    Receiver,
    Sides,
    Way,
    all_pairs,
    best_pair,
    local_way,
    shorten,
)
from router.worker_key import WorkerKey as WorkerKey


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
        self._decodes = DecodeSearch(fleet, self._scores)

    def choose(self, demand: Demand, now_s: float) -> Choice:
        """Chooses by the least cost over both paths, see `Policy`."""
        look = self._look(demand, now_s)
        far_own = self._decode_bound(look)
        far = self._decodes.find(look, far_own)
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
        far = self._decodes.find(look, own)
        computed = self._scores.standing(row).without_prompts(now_s)
        return self._pick(look, [([(0.0, computed, 0.0)], far)], [])

    def _look(self, demand: Demand, now_s: float) -> Look:
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
        return Look(ask, demand, laws, queue, (demand.cached_rows, tokens), cached, excluded)

    def _prompt_bound(self, look: Look) -> FloatArray:
        own = self._scores.prompt_bound(look.laws, look.ask, look.found, look.queue)
        own += self._scores.bias[Role.PREFILL]
        if look.excluded:
            own[look.excluded] = np.inf
        return own

    def _decode_bound(self, look: Look) -> FloatArray:
        own = self._scores.decode_bound(look.laws, look.ask, look.found)
        if not look.demand.has_prefill_pool and look.laws.is_fitted:
            # Whoever decodes computes the prompt as well.
            own += self._scores.prompt_bound(look.laws, look.ask, look.found, look.queue)
        own += self._scores.bias[Role.DECODE]
        if look.excluded:
            own[look.excluded] = np.inf
        return own

    def _senders(self, look: Look, own: FloatArray) -> Near:
        """Returns the best few."""
        fleet, now_s = self._fleet, look.ask.now_s
        rows = shorten(own)
        if fleet.is_anybody_silent(now_s) and fleet.are_silent(rows, now_s).any():
            rows = shorten(np.where(fleet.are_silent(slice(None), now_s), np.inf, own))
        standings = [self._scores.standing(row) for row in rows.tolist()]
        return list(zip(own[rows].tolist(), standings, look.cached[rows].tolist(), strict=True))

    def _local_ways(self, look: Look, far: list[Receiver], own: FloatArray) -> list[Way]:
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
                far = self._decodes.find(look, own, rows, LOCAL_LIST)
            far = [one for one in far if self._scores.standing(one.row).knows_prefill]
            if len(far) > LOCAL_LIST:
                far = sorted(far, key=_own_cost)[:LOCAL_LIST]
        return [
            local_way(look.ask, self._scores.standing(one.row), one, look.cached.item(one.row))
            for one in far
        ]

    def _pair_up(
        self, look: Look, near: tuple[Near, FloatArray], far: tuple[list[Receiver], FloatArray]
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
                receivers = self._decodes.find(look, np.where(others, np.inf, far[1]))
            except (NoWorker, TooLong):
                continue
            sides.append((senders, receivers))
        return sides

    def _pick(self, look: Look, sides: list[Sides], local: list[Way]) -> Choice:
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
