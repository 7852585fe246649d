"""The quick way to a choice is the choice that looking at everybody would make."""

import itertools
import math
from random import Random

import numpy as np
import pytest

from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.cost import LawTable, prefill_terms
from router.fleet import Fleet, Member, Report
from router.load_book import DecodeCharge, LoadBook
from router.policy import Choice, Demand, JointPolicy
from router.scores import Scores
from router.ways import SHORT_LIST
from router.worker_key import WorkerKey

FAST = Profile(
    worker_class="fast",
    prefill=(0.004, 2e-5, 1e-9),
    decode=(0.004, 2e-4, 3e-8),
    transfer=(0.002, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=40_000,
)
SLOW = Profile(
    worker_class="slow",
    prefill=(0.008, 5e-5, 2e-9),
    decode=(0.009, 3e-4, 6e-8),
    transfer=(0.003, 4e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=40_000,
)


class Scene:
    """A fleet under a load that comes and goes."""

    def __init__(self, seed: int, num_workers: int, profiles: tuple[Profile, ...]) -> None:
        self.random = Random(seed)
        self.clock = ManualClock()
        self.fleet = Fleet(silence_s=3.0)
        self.book = LoadBook(self.fleet, self.clock)
        self.table = LawTable(self.fleet, Predictor(profiles))
        self.policy = JointPolicy(self.fleet, self.table)
        self.names = itertools.count()
        self.alive: list[RequestId] = []
        for number in range(num_workers):
            role = Role.PREFILL if number % 2 else Role.DECODE
            key = WorkerKey(WorkerId(f"{role}-{number}"), Incarnation(1))
            profile = profiles[number // 2 % len(profiles)]
            member = Member(
                key=key,
                role=role,
                digest=b"one",
                worker_class=profile.worker_class,
                total_blocks=profile.kv_tokens // 16,
                block_size=16,
                max_num_seqs=12,
                chunk_tokens=2048,
                kv_bytes_per_token=profile.kv_bytes_per_token,
            )
            self.fleet.join(member)
            self.fleet.set_available(key, is_available=True)

    def demand(self) -> Demand:
        rows = self.random.sample(range(len(self.fleet)), len(self.fleet) // 4)
        return Demand(
            num_tokens=self.random.choice((200, 3000, 9000)),
            num_growth_tokens=100,
            num_expected_tokens=80,
            cached_rows=np.array(sorted(rows)),
            cached_tokens=np.array([128 * self.random.randrange(1, 40) for _ in rows]),
            max_local_tokens=self.random.choice((0, 400)),
            tpot_slo_s=self.random.choice((None, 0.007)),
            ttft_slo_s=self.random.choice((None, 0.3)),
        )

    def live(self, choice: Choice, demand: Demand) -> None:
        """Charges a choice, lets others end, and lets some workers say something."""
        name = RequestId(str(next(self.names)))
        uncached = max(demand.num_tokens - choice.cached_tokens, 1)
        terms = prefill_terms(uncached, choice.cached_tokens)
        self.book.charge_prefill(name, choice.prefill or choice.decode, terms)
        charge = DecodeCharge(num_seqs=1, kv_tokens=demand.num_tokens + 40, blocks=9)
        self.book.charge_decode(name, choice.decode, charge)
        for key in {choice.prefill, choice.decode} - {None}:
            self.book.charge_link(key, choice.transfer_s)
        self.alive.append(name)
        if self.random.random() < 0.7:
            done = self.alive.pop(self.random.randrange(len(self.alive)))
            self.book.keep_only(done, ())
        self.clock.advance(self.random.choice((0.001, 0.05)))
        for row, member in self.fleet.members():
            if self.random.random() < 0.95:
                self.fleet.heard_s[row] = self.clock.now()
            if self.random.random() < 0.02:
                report = Report(num_queued=3, queued_tokens=900, num_running=2, kv_tokens=500)
                self.fleet.take_report(member.key, report)
            if self.random.random() < 0.02:
                is_available = self.random.random() < 0.8
                self.fleet.set_available(member.key, is_available=is_available)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("profiles", [(FAST,), (FAST, SLOW)], ids=["alike", "two kinds"])
def test_the_chosen_way_is_the_best_of_all_that_are_listed(
    seed: int, profiles: tuple[Profile, ...]
) -> None:
    scene = Scene(seed, 2 * SHORT_LIST, profiles)
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
    scene = Scene(7, 40, profiles or (FAST,))
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
    scene = Scene(1, 4, (FAST,))
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
