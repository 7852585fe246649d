"""Other routers' policies behind our Protocol, to be compared with ours.

All of them know what our own policy knows: the load that this router dispatched, and the prefix
index. Prefill and decode worker are chosen apart, as those routers do.

    random           any worker
    round robin      one after the other
    power of two     the less loaded of two that are drawn
    threshold        the longest prefix if it is long enough, else the least loaded; the latter at
                     once if loads are too uneven (cache_aware of SGLang's gateway, with its
                     documented defaults: cache threshold 0.3, balance 64 requests and factor 1.5;
                     decode workers by power of two)
    block cost       uncached prompt blocks + blocks queued, the least (KV router of Dynamo with its
                     documented default weight of 1 and temperature 0; decode workers by the blocks
                     that are active there)
"""

import random
from collections.abc import Callable, Collection

import numpy as np

from pdserve.errors import NoWorker, TooLong
from pdserve.request import Role
from router.candidates import TERMS, CandidateTable
from router.cost import LawTable
from router.demand import Demand
from router.fleet import Fleet, FloatArray, IntArray
from router.policy import Choice, Policy
from router.worker_key import WorkerKey

CACHE_THRESHOLD = 0.3
BALANCE_ABSOLUTE = 64
BALANCE_RELATIVE = 1.5

Pick = Callable[[IntArray, Demand, Role], int]
"""Names one of some rows of one pool."""


class SeparatePolicy:
    """Chooses each side by itself."""

    def __init__(self, fleet: Fleet, pick: Pick) -> None:
        """Takes how to choose among the workers of one side."""
        self._fleet = fleet
        self._pick = pick

    def choose(self, demand: Demand, now_s: float) -> Choice:
        """Chooses both, see `Policy`."""
        decodes = self._decodes(demand, demand.excluded, now_s)
        if not demand.has_prefill_pool:
            return self._choice(None, self._pick(decodes, demand, Role.DECODE), demand)
        prefills = np.flatnonzero(self._fleet.usable(Role.PREFILL, demand.excluded, now_s))
        if not len(prefills):
            raise NoWorker("no prefill worker is available")
        prefill = self._pick(prefills, demand, Role.PREFILL)
        return self._choice(prefill, self._pick(decodes, demand, Role.DECODE), demand)

    def choose_decode(self, demand: Demand, prefill: WorkerKey, now_s: float) -> Choice:
        """Chooses the decode side alone, see `Policy`."""
        row = self._fleet.row_of(prefill)
        if row is None:
            raise NoWorker(f"worker {prefill.worker_id} is gone")
        decodes = self._decodes(demand, demand.excluded, now_s)
        return self._choice(row, self._pick(decodes, demand, Role.DECODE), demand)

    def drain_s(self, num_tokens: float, role: Role, now_s: float) -> float | None:
        """Predicts nothing."""
        return None

    def _decodes(self, demand: Demand, excluded: Collection[WorkerKey], now_s: float) -> IntArray:
        rows = np.flatnonzero(self._fleet.usable(Role.DECODE, excluded, now_s))
        if not len(rows):
            raise NoWorker("no decode worker is available")
        sizes = self._fleet.total_blocks[rows] * self._fleet.block_size[rows]
        fitting: IntArray = rows[sizes >= demand.num_tokens + demand.num_growth_tokens]
        if not len(fitting):
            raise TooLong("prompt", demand.num_tokens, f"at most {int(sizes.max())} tokens")
        return fitting

    def _choice(self, prefill: int | None, decode: int, demand: Demand) -> Choice:
        fleet = self._fleet
        pair = (None if prefill is None else fleet.keys[prefill], fleet.keys[decode])
        computes = decode if prefill is None else prefill
        cached = int(cached_tokens(fleet, demand)[computes])
        return Choice(
            prefill=pair[0],
            decode=pair[1],
            path="local" if prefill is None else "disaggregated",
            cached_tokens=cached,
            cached_blocks=cached // int(fleet.block_size[computes]),
            table=CandidateTable(
                is_in_seconds=False, terms=np.zeros((1, len(TERMS))), pairs=(pair,)
            ),
        )


def make_random(fleet: Fleet, _: LawTable) -> Policy:
    """Makes `random`, always in the same order."""
    numbers = random.Random(1)
    return SeparatePolicy(fleet, lambda rows, demand, role: int(rows[numbers.randrange(len(rows))]))


def make_round_robin(fleet: Fleet, _: LawTable) -> Policy:
    """Makes `round robin`."""
    turns = dict.fromkeys(Role, 0)

    def pick(rows: IntArray, demand: Demand, role: Role) -> int:
        turns[role] += 1
        return int(rows[turns[role] % len(rows)])

    return SeparatePolicy(fleet, pick)


def make_power_of_two(fleet: Fleet, _: LawTable) -> Policy:
    """Makes `power of two`."""
    return SeparatePolicy(fleet, power_of_two(fleet))


def make_threshold(fleet: Fleet, _: LawTable) -> Policy:
    """Makes `threshold`."""
    pick_decode = power_of_two(fleet)

    def pick(rows: IntArray, demand: Demand, role: Role) -> int:
        if role is Role.DECODE:
            return pick_decode(rows, demand, role)
        loads = num_requests(fleet, rows, role)
        least, most = float(loads.min()), float(loads.max())
        is_uneven = most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least
        cached = cached_tokens(fleet, demand)[rows]
        if not is_uneven and cached.max() > CACHE_THRESHOLD * demand.num_tokens:
            return int(rows[int(cached.argmax())])
        return _least(fleet, rows, loads)

    return SeparatePolicy(fleet, pick)


def make_block_cost(fleet: Fleet, _: LawTable) -> Policy:
    """Makes `block cost`."""

    def pick(rows: IntArray, demand: Demand, role: Role) -> int:
        size = fleet.block_size[rows]
        if role is Role.DECODE:
            return _least(fleet, rows, fleet.kv_tokens[rows] / size)
        uncached = (demand.num_tokens - cached_tokens(fleet, demand)[rows]) / size
        return _least(fleet, rows, uncached + fleet.queue[1, rows] / size)

    return SeparatePolicy(fleet, pick)


def power_of_two(fleet: Fleet) -> Pick:
    """Returns the pick of the less loaded of two; it has numbers of its own."""
    numbers = random.Random(2)

    def pick(rows: IntArray, demand: Demand, role: Role) -> int:
        drawn = rows[[numbers.randrange(len(rows)), numbers.randrange(len(rows))]]
        return int(drawn[int(num_requests(fleet, drawn, role).argmin())])

    return pick


def num_requests(fleet: Fleet, rows: IntArray, role: Role) -> FloatArray:
    """Returns the requests that each worker has of this router."""
    loads: FloatArray = fleet.queue[0, rows] if role is Role.PREFILL else fleet.num_seqs[rows]
    return loads


def cached_tokens(fleet: Fleet, demand: Demand) -> FloatArray:
    """Returns the tokens that each row probably has cached."""
    cached = np.zeros(fleet.capacity)
    if len(demand.cached_rows):
        cached[demand.cached_rows] = np.minimum(demand.cached_tokens, demand.num_tokens)
    return cached


def _least(fleet: Fleet, rows: IntArray, costs: FloatArray) -> int:
    """Returns the row of the least cost; ties go to the worker picked longest ago."""
    least = rows[costs <= costs.min() + 1e-9]
    return int(least[int(fleet.last_pick[least].argmin())])


BASELINES = {
    "random": make_random,
    "round robin": make_round_robin,
    "power of two": make_power_of_two,
    "threshold": make_threshold,
    "block cost": make_block_cost,
}
