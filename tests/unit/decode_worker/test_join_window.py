import pytest

from decode_worker.join_window import LAUNCH_SHARE, MARGIN_S, JoiningRunner, JoinWindow
from pdserve.engine.batch import SequenceSlice, StepPlan, StepResult
from pdserve.request import BlockId
from pdserve.timeline import ManualClock
from tests.support.scheduling import make_request


class OverStep:
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def result(self) -> StepResult:
        return StepResult(sampled={})


STEP_S, LAUNCH_S = 0.008, 0.0005
SLACK_S = MARGIN_S + LAUNCH_SHARE * LAUNCH_S


def make_plan(num_tokens: int = 1) -> StepPlan:
    part = SequenceSlice(
        request=make_request("r", num_tokens),
        start=0,
        token_ids=(1,) * num_tokens,
        block_ids=(BlockId(0),),
        output_index=0,
    )
    return StepPlan(slices=(part,))


def launch(window: JoinWindow, clock: ManualClock, launch_s: float = LAUNCH_S) -> None:
    window.begin_plan()
    clock.advance(launch_s)
    window.note_launch()


def trained(clock: ManualClock, *steps_s: float) -> JoinWindow:
    """Returns a window that saw steps of these lengths, one after another, and runs one now."""
    window = JoinWindow(clock)
    launch(window, clock)
    for step_s in steps_s:
        clock.advance(step_s)
        window.note_end(make_plan())
        launch(window, clock)
    return window


def test_the_next_launch_is_due_a_margin_before_the_expected_end() -> None:
    clock = ManualClock()
    window = trained(clock, STEP_S, STEP_S, STEP_S)
    assert window.time_left_s() == pytest.approx(STEP_S - SLACK_S)
    clock.advance(STEP_S - SLACK_S)
    assert window.time_left_s() == pytest.approx(0.0)


def test_nothing_is_put_off_before_some_steps_were_seen() -> None:
    clock = ManualClock()
    assert JoinWindow(clock).time_left_s() == 0.0
    assert trained(clock, STEP_S, STEP_S).time_left_s() == 0.0


def test_nothing_is_put_off_with_two_steps_in_flight() -> None:
    clock = ManualClock()
    window = trained(clock, STEP_S, STEP_S, STEP_S)
    launch(window, clock)
    assert window.time_left_s() == 0.0


def test_the_shortest_of_the_last_steps_is_expected() -> None:
    clock = ManualClock()
    window = trained(clock, 0.020, 0.007, 0.009, 0.008)
    assert window.time_left_s() == pytest.approx(0.007 - SLACK_S)


def test_after_a_step_with_a_prompt_nothing_is_put_off() -> None:
    clock = ManualClock()
    window = trained(clock, STEP_S, STEP_S, STEP_S)
    clock.advance(STEP_S)
    window.note_end(make_plan(num_tokens=64))
    launch(window, clock)
    assert window.time_left_s() == 0.0


def test_a_slow_launch_is_remembered_for_a_while() -> None:
    clock = ManualClock()
    window = trained(clock, STEP_S, STEP_S, STEP_S)
    clock.advance(STEP_S)
    window.note_end(make_plan())
    launch(window, clock, launch_s=0.004)
    assert window.time_left_s() < STEP_S - 0.004
    for _ in range(40):
        clock.advance(STEP_S)
        window.note_end(make_plan())
        launch(window, clock)
    assert window.time_left_s() == pytest.approx(STEP_S - SLACK_S)


def test_a_step_behind_another_counts_from_the_end_of_that_one() -> None:
    clock = ManualClock()
    window = trained(clock, STEP_S, STEP_S, STEP_S)
    launch(window, clock)
    clock.advance(STEP_S)
    window.note_end(make_plan())
    clock.advance(0.002)
    assert window.time_left_s() == pytest.approx(STEP_S - 0.002 - SLACK_S)


def test_a_runner_tells_of_its_launches() -> None:
    class Runner:
        max_steps_in_flight = 2

        def launch(self, plan: StepPlan) -> OverStep:
            clock.advance(LAUNCH_S)
            return OverStep()

    clock = ManualClock()
    window = JoinWindow(clock)
    runner = JoiningRunner(Runner(), window)
    assert runner.max_steps_in_flight == 2
    for _ in range(3):
        window.begin_plan()
        assert runner.launch(make_plan()).is_over()
        clock.advance(STEP_S)
        window.note_end(make_plan())
    window.begin_plan()
    runner.launch(make_plan())
    assert window.time_left_s() == pytest.approx(STEP_S - SLACK_S)
