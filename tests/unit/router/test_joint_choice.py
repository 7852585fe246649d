"""Choices in seconds: the predictor's laws decide between workers, pairs and paths."""

import numpy as np
import pytest

from pdserve.errors import NoWorker
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.cost import LawTable, prefill_terms
from router.demand import Demand
from router.fleet import Fleet, Member, Report
from router.load_book import DecodeCharge, LoadBook
from router.policy import Choice, JointPolicy
from router.worker_key import WorkerKey

PROFILE = Profile(
    worker_class="gpu",
    prefill=(0.0, 1e-4, 0.0),
    decode=(0.010, 1e-3, 1e-7),
    transfer=(0.0, 1e-9),
    kv_bytes_per_token=100_000,
    kv_tokens=100_000,
)
"""10,000 tokens a second, hand-offs as fast, steps of 10 ms and a little more for each sequence."""


def _key(name: str) -> WorkerKey:
    return WorkerKey(worker_id=WorkerId(name), incarnation=Incarnation(1))


class Scene:
    def __init__(self, *names: str, profiles: tuple[Profile, ...] = (PROFILE,)) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet()
        self.book = LoadBook(self.fleet, self.clock)
        self.table = LawTable(self.fleet, Predictor(profiles))
        self.policy = JointPolicy(self.fleet, self.table)
        for name in names:
            self.add(name)

    def add(self, name: str, worker_class: str = "gpu", **over: object) -> None:
        fields: dict[str, object] = {
            "key": _key(name),
            "role": Role.PREFILL if name.startswith("p") else Role.DECODE,
            "digest": b"x",
            "worker_class": worker_class,
            "total_blocks": 6000,
            "block_size": 16,
            "max_num_seqs": 8,
            "chunk_tokens": 1000,
            "kv_bytes_per_token": PROFILE.kv_bytes_per_token,
        }
        self.fleet.join(Member(**{**fields, **over}))
        self.fleet.set_available(_key(name), is_available=True)

    def row(self, name: str) -> int:
        row = self.fleet.row_of(_key(name))
        assert row is not None
        return row

    def prompt(self, name: str, num_tokens: int, request: str = "other") -> None:
        terms = prefill_terms(num_tokens, 0)
        self.book.charge_prefill(RequestId(request), _key(name), terms)

    def decode(self, name: str, num_seqs: int, kv_tokens: int = 0) -> None:
        charge = DecodeCharge(num_seqs=num_seqs, kv_tokens=kv_tokens, blocks=0)
        self.book.charge_decode(RequestId(f"on-{name}"), _key(name), charge)

    def choose(
        self, num_tokens: int = 1000, cached: dict[str, int] | None = None, **over
    ) -> Choice:
        found = cached or {}
        demand = Demand(
            num_tokens=num_tokens,
            cached_rows=np.array([self.row(name) for name in found], dtype=np.int64),
            cached_tokens=np.array(list(found.values()), dtype=np.int64),
            **over,
        )
        return self.policy.choose(demand, self.clock.now())


def test_costs_are_in_seconds_once_every_law_is_known() -> None:
    scene = Scene("p0", "d0")
    choice = scene.choose()
    assert choice.table.is_in_seconds
    expected = choice.expected
    assert expected.prefill_time == pytest.approx(0.1, rel=0.02)
    assert expected.first_token == pytest.approx(0.1, rel=0.02)
    assert expected.handoff == pytest.approx(0.1, rel=0.02)
    assert expected.step == pytest.approx(0.0111, rel=0.02)
    assert expected.cost == pytest.approx(0.2111, rel=0.02)


def test_one_class_that_is_not_known_puts_all_back_into_blocks() -> None:
    scene = Scene("p0", "d0")
    scene.add("d1", "unseen")
    assert not scene.choose().table.is_in_seconds
    scene.fleet.leave(_key("d1"))
    assert scene.choose().table.is_in_seconds


def test_a_cached_prefix_is_worth_the_time_that_computing_it_takes() -> None:
    scene = Scene("p0", "p1", "d0")
    scene.prompt("p0", 5000)
    assert scene.choose(8000, {"p0": 6000, "d0": 8000}).prefill == _key("p0")
    assert scene.choose(8000, {"p0": 4000, "d0": 8000}).prefill == _key("p1")


def test_the_head_of_a_queue_counts_for_what_is_left_of_it() -> None:
    scene = Scene("p0", "d0")
    scene.prompt("p0", 10_000, "head")
    scene.prompt("p0", 2000, "next")
    assert scene.choose().expected.queue == pytest.approx(1.2, rel=0.02)
    scene.clock.advance(0.5)
    assert scene.choose().expected.queue == pytest.approx(0.7, rel=0.02)
    scene.clock.advance(99.0)
    assert scene.choose().expected.queue == pytest.approx(0.2, rel=0.02)
    scene.book.finish_prefill(RequestId("head"), _key("p0"))
    assert scene.choose().expected.queue == pytest.approx(0.2, rel=0.02)


def test_a_hand_off_hides_behind_the_chunks_that_follow() -> None:
    scene = Scene("p0", "d0")
    assert scene.choose(10_000).expected.handoff == pytest.approx(0.1, rel=0.02)


def test_what_decode_has_cached_is_not_handed_off() -> None:
    scene = Scene("p0", "d0", "d1")
    choice = scene.choose(1000, {"d1": 800})
    assert choice.decode == _key("d1")
    assert choice.expected.handoff == pytest.approx(0.02, rel=0.02)


def test_a_busy_link_delays_and_is_avoided() -> None:
    scene = Scene("p0", "d0", "d1")
    scene.book.charge_link(_key("d0"), scene.clock.now() + 5.0)
    assert scene.choose().decode == _key("d1")
    scene.book.charge_link(_key("d1"), scene.clock.now() + 9.0)
    choice = scene.choose()
    assert choice.decode == _key("d0")
    assert choice.expected.handoff == pytest.approx(5.0, rel=0.02)


def test_hand_offs_keep_a_link_for_as_long_as_they_take_and_not_until_they_land() -> None:
    scene = Scene("p0", "d0")
    for _ in range(2):
        scene.book.charge_link(_key("d0"), 0.5)
    assert scene.choose().expected.handoff == pytest.approx(1.0, rel=0.02)
    scene.clock.advance(0.9)
    # A prompt that will be computed in ten seconds has planned a hand-off as well.
    scene.book.charge_link(_key("d0"), 0.5)
    assert scene.choose().expected.handoff == pytest.approx(0.6, rel=0.02)


def test_work_costs_others_only_while_nobody_is_idle() -> None:
    scene = Scene("p0", "p1", "d0")
    scene.prompt("p0", 4000, "a")
    assert scene.choose(1000).expected.stall == 0.0
    scene.prompt("p1", 2000, "b")
    # The shortest queue is 0.2 s of prompts that take 0.3 s on average.
    assert scene.choose(1000).expected.stall == pytest.approx(0.1 * 0.2 / 0.3, rel=0.02)


def test_a_full_decode_worker_costs_the_wait_for_its_room() -> None:
    scene = Scene("p0", "d0", "d1")
    scene.decode("d0", 8)
    choice = scene.choose(num_expected_tokens=1000)
    assert choice.decode == _key("d1")
    scene.decode("d1", 8)
    wait_s = scene.choose(num_expected_tokens=1000).expected.wait
    assert 1.0 < wait_s < 3.0


def test_the_wanted_time_per_token_comes_before_any_cost() -> None:
    scene = Scene("p0", "d0", "d1")
    scene.decode("d0", 4)
    prefix = {"d0": 10_000}
    assert scene.choose(10_000, prefix).decode == _key("d0")
    assert scene.choose(10_000, prefix, tpot_slo_s=0.0135).decode == _key("d1")


def test_if_nobody_keeps_it_the_one_that_misses_least_is_taken() -> None:
    scene = Scene("p0", "d0", "d1")
    scene.decode("d0", 4)
    scene.decode("d1", 2)
    choice = scene.choose(10_000, {"d0": 10_000}, tpot_slo_s=0.005)
    assert choice.decode == _key("d1")
    assert choice.expected.missed == pytest.approx(choice.expected.step - 0.005)


def test_a_short_rest_is_computed_where_it_is_cached_if_that_is_quicker() -> None:
    scene = Scene("p0", "d0")
    choice = scene.choose(1000, {"d0": 900}, max_local_tokens=200)
    assert choice.path == "local"
    # Now others would be held up, and prefill has it cached as well.
    scene.decode("d0", 7)
    choice = scene.choose(1000, {"d0": 900, "p0": 999}, max_local_tokens=200)
    assert choice.path == "disaggregated"


def test_a_rest_beyond_the_limit_is_never_local() -> None:
    scene = Scene("p0", "d0")
    assert scene.choose(1000, {"d0": 900}, max_local_tokens=99).path == "disaggregated"
    assert scene.choose(1000, {"d0": 900}, max_local_tokens=0).path == "disaggregated"


def test_a_worker_whose_prefill_law_is_not_known_prefills_nothing() -> None:
    decode_only = Predictor([PROFILE])
    scene = Scene("p0")
    scene.add("d0", "other")
    for source, kind in list(decode_only._fits):
        if kind.__name__ == "DecodeSample":
            decode_only._fits["other", kind] = decode_only._fits[source, kind]
    scene.policy = JointPolicy(scene.fleet, LawTable(scene.fleet, decode_only))
    choice = scene.choose(1000, {"d0": 900}, max_local_tokens=200)
    assert (choice.table.is_in_seconds, choice.path) == (True, "disaggregated")


def test_the_best_pair_is_not_always_made_of_the_best_of_each_side() -> None:
    scene = Scene("p0", "p1", "d0", "d1")
    scene.prompt("p0", 100)
    # The link of the best prefill worker is busy for long.
    scene.book.charge_link(_key("p1"), 50.0)
    assert scene.choose().prefill == _key("p0")


def test_the_table_holds_the_chosen_way_first_and_is_short() -> None:
    scene = Scene(*(f"p{number:02}" for number in range(20)), *(f"d{n:02}" for n in range(20)))
    table = scene.choose().table
    costs = [one.cost for one in table.candidates()]
    assert len(costs) == 8
    assert costs == sorted(costs)


def test_what_other_fronts_have_there_counts() -> None:
    scene = Scene("p0", "p1", "d0")
    report = Report(num_queued=2, queued_tokens=20_000, num_running=0, kv_tokens=0)
    scene.fleet.take_report(_key("p0"), report)
    assert scene.choose().prefill == _key("p1")
    idle = Report(num_queued=0, queued_tokens=0, num_running=0, kv_tokens=0)
    scene.fleet.take_report(_key("p0"), idle)
    assert scene.choose(cached={"p0": 500}).prefill == _key("p0")


def test_own_work_in_a_late_report_is_not_taken_for_others() -> None:
    scene = Scene("p0", "d0")
    scene.prompt("p0", 5000)
    scene.book.finish_prefill(RequestId("other"), _key("p0"))
    report = Report(num_queued=1, queued_tokens=5000, num_running=0, kv_tokens=0)
    scene.fleet.take_report(_key("p0"), report)
    assert scene.choose().expected.queue == 0.0
    scene.fleet.take_report(_key("p0"), report)
    scene.fleet.take_report(_key("p0"), report)
    assert scene.choose().expected.queue == pytest.approx(0.5, rel=0.02)


def test_what_fronts_say_to_each_other_counts_until_it_is_forgotten() -> None:
    scene = Scene("p0", "p1", "d0")
    scene.fleet.set_shared(WorkerId("p0"), np.array([1.0, 9000.0, 0.0]), 0.0, 0.0)
    assert scene.choose().prefill == _key("p1")
    scene.fleet.clear_shared()
    assert scene.choose(cached={"p0": 500}).prefill == _key("p0")


def test_a_wanted_first_token_prefers_who_can_make_it() -> None:
    scene = Scene("p0", "p1", "d0")
    # Cheaper over all, by its cache on the way to decode, is not sooner.
    scene.prompt("p0", 2000)
    scene.book.charge_link(_key("p1"), 10.0)
    assert scene.choose().prefill == _key("p0")
    assert scene.choose(ttft_slo_s=0.15).prefill == _key("p1")


def test_a_pool_drains_as_fast_as_all_its_workers() -> None:
    scene = Scene("p0", "p1", "d0")
    seconds = scene.table.drain_s(20_000, Role.PREFILL, 0.0)
    assert seconds == pytest.approx(1.0, rel=0.02)
    assert Scene("p0", "d0", profiles=()).table.drain_s(1, Role.PREFILL, 0.0) is None


def test_rows_are_reused_and_forget_their_last_worker() -> None:
    scene = Scene("p0", "d0")
    row = scene.row("p0")
    scene.prompt("p0", 5000)
    scene.fleet.leave(_key("p0"))
    with pytest.raises(NoWorker):
        scene.choose()
    scene.add("p1")
    assert scene.row("p1") == row
    assert scene.choose().expected.queue == 0.0
    scene.book.keep_only(RequestId("other"), ())
    assert not scene.fleet.queue.any()


def test_the_fleet_grows_and_keeps_what_it_knew() -> None:
    scene = Scene("p0", "d0")
    scene.prompt("p0", 5000)
    for number in range(100):
        scene.add(f"d-more-{number}")
    assert scene.choose().expected.queue == pytest.approx(0.5, rel=0.02)
