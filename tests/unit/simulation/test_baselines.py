from collections import Counter
from dataclasses import replace

import pytest

from pdserve.errors import NoWorker, TooLong
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.placer import PlaceQuery
from router.worker_key import WorkerKey
from simulation.baselines import BALANCE_ABSOLUTE, BASELINES
from simulation.routing import Brain

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.004, 2e-5, 0.0),
    decode=(0.004, 2e-5, 3e-8),
    transfer=(0.001, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=64_000,
)


def key_of(name: str) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation(1))


def make_brain(policy: str, num_prefill: int = 4, num_decode: int = 4) -> Brain:
    brain = Brain([PROFILE], ManualClock(), make_policy=BASELINES[policy])
    for number in range(num_prefill):
        brain.join(key_of(f"p{number}"), Role.PREFILL, PROFILE)
    for number in range(num_decode):
        brain.join(key_of(f"d{number}"), Role.DECODE, PROFILE)
    return brain


def query(name: str, granules: tuple[int, ...] = (), num_tokens: int = 1000) -> PlaceQuery:
    return PlaceQuery(
        request_id=RequestId(name),
        num_tokens=num_tokens,
        num_growth_tokens=100,
        granules=granules,
    )


@pytest.mark.parametrize("policy", BASELINES)
def test_each_chooses_a_worker_of_each_pool_that_is_there(policy: str):
    brain = make_brain(policy)
    for number in range(20):
        choice = brain.place(query(str(number), (number, number + 1)))
        assert choice.prefill is not None
        assert choice.prefill.worker_id.startswith("p")
        assert choice.decode.worker_id.startswith("d")
    brain.leave(key_of("p0"))
    assert key_of("p0") not in {brain.place(query(f"x{i}")).prefill for i in range(40)}


@pytest.mark.parametrize("policy", BASELINES)
def test_each_says_when_nobody_can_take_a_request(policy: str):
    brain = make_brain(policy, num_prefill=1, num_decode=1)
    with pytest.raises(TooLong):
        brain.place(query("long", num_tokens=70_000))
    excluded = replace(query("a"), excluded=(key_of("d0"),))
    with pytest.raises(NoWorker):
        brain.place(excluded)
    with pytest.raises(NoWorker):
        brain.place_decode(excluded, key_of("p0"))
    with pytest.raises(NoWorker):
        brain.place_decode(query("a"), key_of("p9"))
    assert brain.place_decode(query("a"), key_of("p0")) == key_of("d0")


def test_round_robin_takes_all_equally():
    brain = make_brain("round robin")
    picks = Counter(brain.place(query(str(i))).prefill for i in range(40))
    assert set(picks.values()) == {10}


def test_power_of_two_avoids_the_loaded_one():
    brain = make_brain("power of two")
    first = brain.place(query("first")).prefill
    picks = Counter(brain.place(query(str(i))).prefill for i in range(39))
    assert picks[first] <= 12
    assert len(picks) == 4


@pytest.mark.parametrize("policy", ["threshold", "block cost"])
def test_a_cached_prefix_draws_requests(policy: str):
    brain = make_brain(policy)
    granules = tuple(range(7))
    first = brain.place(query("first", granules)).prefill
    assert first is not None
    brain.finish_prefill(RequestId("first"), first)
    assert brain.place(query("second", granules)).prefill == first


def test_threshold_leaves_the_prefix_when_loads_are_uneven():
    brain = make_brain("threshold")
    granules = tuple(range(7))
    picks = [brain.place(query(str(i), granules)).prefill for i in range(BALANCE_ABSOLUTE + 3)]
    assert len(set(picks[: BALANCE_ABSOLUTE + 1])) == 1
    assert picks[-1] != picks[0]


def test_block_cost_leaves_the_prefix_when_its_queue_costs_more():
    brain = make_brain("block cost")
    granules = tuple(range(7))
    picks = {brain.place(query(str(i), granules)).prefill for i in range(20)}
    assert len(picks) > 1
