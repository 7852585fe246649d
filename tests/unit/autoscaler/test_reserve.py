"""What is kept for the next burst."""

from dataclasses import replace

from autoscaler.demand import Demand
from autoscaler.figures import Traffic
from autoscaler.need import FORESEEN
from autoscaler.reserve import BurstMemory
from autoscaler.roster import Roster
from pdserve.predictor.predictor import Predictor
from pdserve.request import Role
from tests.unit.autoscaler.clocked_policy import BUSY, PROFILE, SETTINGS, Clocked, kinds, worker
from tests.unit.autoscaler.test_parts import figures


class Memory:
    """A memory of ten minutes; one replica does one request a second and starts in 20 s."""

    def __init__(self, keep_s: float = 600.0) -> None:
        self.memory = BurstMemory(keep_s)
        self.now_s = 0.0

    def see(
        self, rate: float, seconds: int, *, is_late: bool = False, num_serving: int = 2
    ) -> float:
        for _ in range(seconds):
            self.now_s += 1.0
            self.memory.note(
                self.now_s,
                rate,
                lambda per_s: round(per_s),
                is_late=is_late,
                num_serving=num_serving,
                start_s=20.0,
            )
        return self.memory.peak_per_s(self.now_s)


def test_burst_that_was_met_late_is_remembered_with_its_rate_and_then_forgotten() -> None:
    memory = Memory()
    assert memory.see(2.0, 60) == 0.0
    assert memory.see(8.0, 30, is_late=True) == 8.0
    assert memory.see(2.0, 590) == 8.0
    assert memory.see(2.0, 20) == 0.0


def test_burst_that_finds_its_reserve_renews_it_although_nobody_waits() -> None:
    memory = Memory()
    memory.see(2.0, 60)
    memory.see(8.0, 30, is_late=True)
    memory.see(2.0, 400)
    memory.see(7.0, 30, num_serving=8)
    assert memory.see(2.0, 500) == 7.0


def test_load_that_climbs_no_faster_than_replicas_start_is_no_burst() -> None:
    memory = Memory()
    for step in range(100):
        memory.see(2.0 + step * 0.1, 10, num_serving=2 + step // 10)
    assert memory.see(12.0, 1) == 0.0


def test_late_requests_alone_are_no_burst() -> None:
    # Slow, but no more than what serves can take.
    assert Memory().see(2.0, 100, is_late=True) == 0.0


def test_nothing_is_remembered_for_no_time() -> None:
    assert Memory(0.0).see(9.0, 100, is_late=True) == 0.0


def test_what_starts_is_counted_as_far_as_it_will_have_served_by_then() -> None:
    roster = Roster(lost_s=5.0, start_s=20.0, drain_s=10.0)
    roster.update(0.0, [figures("decode-0", is_serving=False)])
    roster.update(5.0, [figures(f"decode-{i}", is_serving=False) for i in range(2)])
    assert roster.coming_s(Role.DECODE, 15.0) == 15.0 + 10.0
    assert roster.coming_s(Role.DECODE, 60.0) == 2 * 20.0


def test_decode_grows_for_what_prefill_is_about_to_send_while_prompts_still_wait() -> None:
    clocked = Clocked()
    pair = (worker("prefill-0", num_running=1), worker("decode-0", num_running=10, used_blocks=50))
    # A hundred tokens each, two a second: prefill can send 4.7 of the 1000 tokens that each has.
    for second in range(40):
        traffic = replace(
            BUSY,
            num_arrived=2 * second,
            prompt_tokens=2000 * second,
            output_tokens=400 * second,
        )
        # 0.42 s of prefill a second.
        calm = replace(pair[0], num_running=int(second % 5 < 2))
        assert clocked.see(calm, pair[1], traffic=traffic) == []
    assert isinstance(traffic, Traffic)
    full = replace(pair[0], queued_tokens=200_000, num_waiting=200)
    many = [replace(full, worker_id=f"prefill-{i}") for i in range(8)]
    decisions = clocked.see(*many, pair[1], traffic=replace(traffic, oldest_s=5.0), seconds=2)
    # Eight send 38 prompts a second, of 200 tokens: at 50 ms each that is 8 replicas; two for now.
    assert ("grow", Role.DECODE, 2) in kinds(decisions)
    grown = next(one for one in decisions if one.role is Role.DECODE)
    assert grown.numbers.why == FORESEEN


def test_outputs_that_are_still_to_be_made_are_reckoned_with_where_many_came_at_once() -> None:
    # A hundred tokens each: ten have ended, ten are half made, and forty have not begun.
    settings = replace(SETTINGS, rate_window_s=30.0)
    demand = Demand(settings, Predictor([PROFILE]))
    roster = Roster(lost_s=5.0, start_s=20.0, drain_s=10.0)
    calm = (worker("prefill-0"), worker("decode-0"))
    full = (worker("prefill-0", num_running=1, num_waiting=39), worker("decode-0", num_running=10))
    for second, workers in enumerate((calm, full)):
        roster.update(float(second), workers)
        tokens = 60_000 * second
        traffic = replace(
            BUSY, num_arrived=60 * second, prompt_tokens=tokens, output_tokens=1500 * second
        )
        demand.note(float(second), traffic, roster)
    need = demand.needs(Role.DECODE)[0]
    assert demand.replicas_for(Role.DECODE, need, 60.0) == 6
