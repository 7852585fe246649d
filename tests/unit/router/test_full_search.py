"""However little is looked at, the choice is the one that a plain search over everybody makes."""

import math

import pytest

from pdserve.errors import NoWorker
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import Role
from router.cost import LawTable, prefill_cost
from router.demand import Demand
from router.policy import Choice, JointPolicy
from router.scores import Ask, Scores, Standing
from router.ways import (
    LOCAL_LIST,
    SHORT_LIST,
    Receiver,
    Way,
    local_way,
    make_receiver,
    make_sender,
    pair_way,
)
from tests.support.fleet_scene import FAST, SLOW, FleetScene

Found = list[tuple[float, Standing, float]]
"""What a worker is sorted by, itself, and the tokens that it has cached."""


class PlainSearch:
    """Looks at each worker by itself, with everything that counts; no arrays, no bounds."""

    def __init__(self, scene: FleetScene, table: LawTable) -> None:
        self.scene = scene
        self.scores = Scores(scene.fleet, table)

    def best_way(self, demand: Demand) -> Way | None:
        """Returns the best of all ways between the best few of each side."""
        now_s = self.scene.clock.now()
        ask = self._ask(demand, now_s)
        cached = dict(zip(demand.cached_rows.tolist(), demand.cached_tokens.tolist(), strict=True))
        cached = {row: min(count, demand.num_tokens) for row, count in cached.items()}
        decodes = sorted(self._decodes(ask, demand, cached), key=_cost)
        prefills = sorted(self._prefills(ask, cached), key=_cost)[:SHORT_LIST]
        local = self._local(ask, demand, decodes)
        if not decodes or (not prefills and not local):
            return None
        receivers = [_receiver(ask, one) for one in decodes[:SHORT_LIST]]
        senders = [make_sender(ask, one, count) for _, one, count in prefills]
        pairs = [pair_way(ask, sender, receiver) for sender in senders for receiver in receivers]
        return min([*pairs, *local], key=lambda way: way.rank)

    def _ask(self, demand: Demand, now_s: float) -> Ask:
        laws = self.scores.refresh(now_s)
        crowding = self.scores.crowding(self.scores.queue(now_s), Role.PREFILL)
        return Ask(
            now_s,
            laws.is_fitted,
            crowding,
            demand.num_tokens,
            demand.num_samples,
            demand.num_kv_tokens,
            demand.num_expected_tokens,
            demand.tpot_slo_s or math.inf,
            demand.ttft_slo_s or math.inf,
        )

    def _usable(self, role: Role, now_s: float) -> list[int]:
        fleet = self.scene.fleet
        return [
            row
            for row, member in fleet.members()
            if member.role is role and fleet.is_available[row] and fleet.heard_s[row] >= now_s - 3.0
        ]

    def _prefills(self, ask: Ask, cached: dict[int, int]) -> Found:
        found: Found = []
        for row in self._usable(Role.PREFILL, ask.now_s):
            one, count = self.scores.standing(row), float(cached.get(row, 0))
            time = prefill_cost(one.prefill, max(ask.num_tokens - count, 1.0), count)
            found.append((one.queue(ask.now_s) + time * (1 + ask.crowding) + one.tie, one, count))
        return found

    def _decodes(self, ask: Ask, demand: Demand, cached: dict[int, int]) -> Found:
        found: Found = []
        for row in self._usable(Role.DECODE, ask.now_s):
            one, count = self.scores.standing(row), float(cached.get(row, 0))
            if one.room_tokens < demand.num_tokens + demand.num_growth_tokens:
                continue
            # Samples begin with a block of their own behind those of the prompt.
            own_tokens = demand.num_samples * self.scene.fleet.block_size[row]
            if demand.num_samples > 1 and one.room_tokens - own_tokens < demand.num_tokens:
                continue
            receiver = make_receiver(ask, one, count)
            handoff = self._handoff_s(row) * (demand.num_tokens - count)
            cost = receiver.life + receiver.wait + receiver.extra + handoff
            found.append((cost, one, count))
        return found

    def _handoff_s(self, row: int) -> float:
        """Returns what a token adds to a hand-off, by the slowest sender."""
        laws = self.scores.refresh(self.scene.clock.now())
        return laws.kinds[laws.kind_of.item(row)].handoff

    def _local(self, ask: Ask, demand: Demand, decodes: Found) -> list[Way]:
        limit = demand.max_local_tokens
        if not limit:
            return []
        if demand.num_tokens <= limit:
            receivers = [_receiver(ask, one) for one in decodes[:SHORT_LIST]]
            receivers.sort(key=lambda one: one.life + one.wait + one.extra)
        else:
            fit = [found for found in decodes if demand.num_tokens - found[2] <= limit]
            receivers = [_receiver(ask, one) for one in fit]
        cached = {one.row: count for _, one, count in decodes}
        return [
            local_way(ask, self.scores.standing(one.row), one, cached[one.row])
            for one in receivers[:LOCAL_LIST]
        ]


def _cost(found: tuple[float, Standing, float]) -> float:
    return found[0]


def _receiver(ask: Ask, found: tuple[float, Standing, float]) -> Receiver:
    return make_receiver(ask, found[1], found[2])


def _choose(policy: JointPolicy, demand: Demand, now_s: float) -> Choice | None:
    try:
        return policy.choose(demand, now_s)
    except NoWorker:
        return None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_workers", [6, 40, 300])
@pytest.mark.parametrize("profiles", [(FAST,), (FAST, SLOW)], ids=["alike", "two kinds"])
def test_a_choice_is_the_one_of_a_plain_search(
    seed: int, num_workers: int, profiles: tuple[Profile, ...]
) -> None:
    scene = FleetScene(seed, num_workers, profiles)
    search = PlainSearch(scene, LawTable(scene.fleet, Predictor(profiles)))
    scene.load(16)
    num_waits = num_misses = 0
    for _ in range(80 if num_workers < 300 else 25):
        demand = scene.demand()
        wanted = search.best_way(demand)
        choice = _choose(scene.policy, demand, scene.clock.now())
        assert (wanted is None) == (choice is None)
        if wanted is None or choice is None:
            scene.pass_time()
            continue
        keys = scene.fleet.keys
        local = wanted.computes == wanted.decodes
        pair = (None if local else keys[wanted.computes], keys[wanted.decodes])
        # Two ways of one cost may change places in the last bit of a sum.
        found = choice.expected
        assert (choice.prefill, choice.decode) == pair or found.cost == pytest.approx(
            wanted.terms[7], rel=1e-9
        )
        num_waits += found.wait > 0
        num_misses += found.missed > 0
        scene.live(choice, demand)
    if num_workers == 6:
        # The fleet is as loaded as it must be for the quick look not to do.
        assert num_waits + num_misses
