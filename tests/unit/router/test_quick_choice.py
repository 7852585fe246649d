"""The quick way to a choice is the choice that looking at everybody would make."""

import math

import numpy as np
import pytest

from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import RequestId, Role
from router.cost import LawTable, prefill_terms
from router.demand import Demand
from router.policy import JointPolicy
from router.scores import Scores
from router.ways import SHORT_LIST
from tests.support.fleet_scene import FAST, SLOW, FleetScene


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("profiles", [(FAST,), (FAST, SLOW)], ids=["alike", "two kinds"])
def test_the_chosen_way_is_the_best_of_all_that_are_listed(
    seed: int, profiles: tuple[Profile, ...]
) -> None:
    scene = FleetScene(seed, 2 * SHORT_LIST, profiles)
    for _ in range(60):
        demand = scene.demand()
        choice = scene.policy.choose(demand, scene.clock.now())
        best, *others = choice.table.candidates()
        assert (best.prefill, best.decode) == (choice.prefill, choice.decode)
        limit_s = math.inf if demand.ttft_slo_s is None else demand.ttft_slo_s

        def standing(one, limit_s=limit_s):
            return (1e9 * (max(one.first_token - limit_s, 0) + one.missed) + one.cost) * (1 - 1e-9)

        assert all(standing(best) <= standing(one) + 1e-5 for one in others)
        scene.live(choice, demand)


@pytest.mark.parametrize("profiles", [(FAST,), (FAST, SLOW), ()], ids=["one", "two", "blocks"])
def test_what_is_kept_is_what_a_new_look_would_find(profiles: tuple[Profile, ...]) -> None:
    scene = FleetScene(7, 40, profiles or (FAST,))
    if not profiles:
        scene.table = LawTable(scene.fleet, Predictor())
        scene.policy = JointPolicy(scene.fleet, scene.table)
    kept = Scores(scene.fleet, scene.table)
    for _ in range(120):
        demand = scene.demand()
        scene.live(scene.policy.choose(demand, scene.clock.now()), demand)
        kept.refresh(scene.clock.now())
        fresh = Scores(scene.fleet, scene.table)
        fresh.refresh(scene.clock.now())
        assert np.allclose(kept.rest, fresh.rest)
        assert np.allclose(kept.until_s, fresh.until_s)
        assert np.allclose(kept.step, fresh.step)
        assert all((np.isinf(kept.bias[role]) == np.isinf(fresh.bias[role])).all() for role in Role)
        queue = kept.queue(scene.clock.now())
        crowding = fresh.crowding(queue, Role.PREFILL)
        assert kept.crowding(queue, Role.PREFILL) == pytest.approx(crowding)


def test_a_worker_that_others_wait_behind_is_worth_less_than_its_queue_says() -> None:
    scene = FleetScene(1, 4, (FAST,))
    near, far = (key for key in scene.fleet.keys if key.worker_id.startswith("prefill"))
    for number in range(20):
        scene.book.charge_prefill(RequestId(f"n{number}"), near, prefill_terms(1000, 0))
        scene.book.charge_prefill(RequestId(f"f{number}"), far, prefill_terms(1000, 0))
    # `near` has the prefix and one prompt more than that is worth: alone, it would not be taken.
    scene.book.charge_prefill(RequestId("more"), near, prefill_terms(4100, 0))
    row = scene.fleet.row_of(near)
    demand = Demand(num_tokens=4200, cached_rows=np.array([row]), cached_tokens=np.array([4096]))
    choice = scene.policy.choose(demand, scene.clock.now())
    assert choice.prefill == near
    first, *others = choice.table.candidates()
    assert first.first_token > min(one.first_token for one in others)
    assert first.stall < min(one.stall for one in others if one.prefill == far)
