"""The parts of the policy by themselves."""

import pytest

from autoscaler.figures import WorkerFigures
from autoscaler.queueing import servers_needed
from autoscaler.roster import Roster
from autoscaler.settings import PoolRange, ScalingSettings, parse_range
from autoscaler.speed import SpeedMeter
from autoscaler.window import CounterWindow, Window
from pdserve.errors import ConfigError
from pdserve.request import Role


def test_no_work_needs_no_server() -> None:
    assert servers_needed(0.0, 1.0, 1.0, tail=0.05, utilization=0.8) == 0


def test_one_server_waits_as_the_formula_of_the_simple_queue_says() -> None:
    # M/M/1 at half load: P(wait > t) = 0.5 exp(-0.5 t / s); 0.05 is reached at t = 4.6 s.
    assert servers_needed(0.5, 1.0, 4.7, tail=0.05, utilization=0.8) == 1
    assert servers_needed(0.5, 1.0, 4.5, tail=0.05, utilization=0.8) == 2


def test_many_servers_need_less_room_each() -> None:
    few = servers_needed(2.0, 1.0, 0.5, tail=0.05, utilization=0.95)
    many = servers_needed(200.0, 1.0, 0.5, tail=0.05, utilization=0.95)
    assert few / 2.0 > many / 200.0


def test_without_a_budget_only_the_utilization_counts() -> None:
    assert servers_needed(2.0, 1.0, -1.0, tail=0.05, utilization=0.8) == 3


def test_step_is_no_rise_and_a_climb_is_one() -> None:
    step, climb = Window(120.0), Window(120.0)
    for second in range(100):
        step.add(second, 1.0 if second < 70 else 2.0)
        climb.add(second, second * 0.5)
    assert step.mean_rise(60.0) == 0.0
    assert climb.mean_rise(60.0) == pytest.approx(0.5, rel=0.1)


def test_short_past_is_no_rise() -> None:
    window = Window(120.0)
    for second in range(20):
        window.add(second, second)
    assert window.mean_rise(60.0) == 0.0


def test_counter_that_starts_anew_counts_from_zero() -> None:
    counter = CounterWindow(60.0)
    for second, count in enumerate((1000, 1010, 1020, 10, 20)):
        counter.add(second, count)
    assert counter.per_s(60.0) == 10.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", PoolRange(least=3, most=3)), ("0..2", PoolRange(least=0, most=2))],
)
def test_range_is_read(text: str, expected: PoolRange) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3..1", r"0 <= MIN <= MAX, got 3\.\.1"),
        ("-1", r"0 <= MIN <= MAX, got -1\.\.-1"),
        ("many", "a number or MIN..MAX, got 'many'"),
        ("1..", "a number or MIN..MAX"),
    ],
)
def test_range_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_range(text)


def test_settings_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ConfigError, match="most_in_all must be at least 2, got 1"):
        ScalingSettings(most_in_all=1)
    with pytest.raises(ConfigError, match="ttft_s must be above 0, got 0"):
        ScalingSettings(ttft_s=0)


def figures(name: str, *, is_serving: bool, is_draining: bool = False) -> WorkerFigures:
    return WorkerFigures(
        worker_id=name, role=Role.DECODE, is_serving=is_serving, is_draining=is_draining
    )


def test_roster_learns_how_long_starts_and_drains_take() -> None:
    roster = Roster(lost_s=5.0, start_s=20.0, drain_s=10.0)
    roster.update(0.0, [figures("decode-0", is_serving=False)])
    roster.update(40.0, [figures("decode-0", is_serving=True)])
    assert roster.start_s[Role.DECODE] == 30.0
    roster.update(50.0, [figures("decode-0", is_serving=False, is_draining=True)])
    roster.update(52.0, [])
    assert roster.drain_s[Role.DECODE] == 6.0


def test_replica_that_was_there_already_teaches_nothing() -> None:
    roster = Roster(lost_s=5.0, start_s=20.0, drain_s=10.0)
    roster.update(0.0, [figures("decode-0", is_serving=True)])
    assert roster.start_s[Role.DECODE] == 20.0


def test_replica_that_is_not_heard_of_for_long_counts_as_starting() -> None:
    roster = Roster(lost_s=5.0, start_s=20.0, drain_s=10.0)
    roster.update(0.0, [figures("decode-0", is_serving=True)])
    roster.update(4.0, [figures("decode-0", is_serving=False)])
    assert len(roster.serving(Role.DECODE, 4.0)) == 1
    roster.update(6.0, [figures("decode-0", is_serving=False)])
    assert roster.serving(Role.DECODE, 6.0) == []
    assert len(roster.starting(Role.DECODE, 6.0)) == 1


def test_C16_speed_is_not_taken_from_a_pool_with_a_cold_replica() -> None:
    meter, tokens = SpeedMeter(), 0
    one = [figures("decode-0", is_serving=True)]
    two = [*one, figures("decode-1", is_serving=True)]
    for second in range(40):
        tokens += 1000
        meter.note(float(second), one, tokens, 0, 1)
    assert meter.tokens_per_s == pytest.approx(1000.0)
    for second in range(40, 49):
        meter.note(float(second), two, tokens, 0, 2)
    assert meter.tokens_per_s == pytest.approx(1000.0)
