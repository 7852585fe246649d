import pytest

from pdserve.engine.batch import (
    PendingStep,
    SequenceSlice,
    StepPlan,
    StepResult,
)
from pdserve.engine.pipeline import StepPipeline
from pdserve.request import BlockId
from tests.support.scheduling import make_request


def make_plan(index: int) -> StepPlan:
    part = SequenceSlice(
        request=make_request(f"r{index}", 1),
        start=0,
        token_ids=(1,),
        block_ids=(BlockId(0),),
        output_index=0,
    )
    return StepPlan(slices=(part,))


class LoggingRunner:
    """Notes what is asked of it."""

    def __init__(self, max_steps_in_flight: int) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self.log: list[str] = []
        self.is_over = False

    def launch(self, plan: StepPlan) -> PendingStep:
        name = plan.slices[0].request.request_id
        self.log.append(f"launch {name}")
        return _LoggingStep(self, name)


class _LoggingStep:
    def __init__(self, runner: LoggingRunner, name: str) -> None:
        self._runner = runner
        self._name = name

    def is_over(self) -> bool:
        return self._runner.is_over

    def wait(self) -> None:
        raise AssertionError("a pipeline waits for a result")

    def result(self) -> StepResult:
        self._runner.log.append(f"result {self._name}")
        return StepResult(sampled={})


def run(max_steps_in_flight: int, plans: list[StepPlan | None]) -> list[str]:
    """Turns until all plans are gone and nothing is in flight; None in the list: not now."""
    runner = LoggingRunner(max_steps_in_flight)
    pipeline = StepPipeline(runner, lambda: plans.pop(0) if plans else None)
    while plans or not pipeline.is_empty:
        ended = pipeline.turn()
        if ended is not None:
            runner.log.append(f"book {ended.plan.slices[0].request.request_id}")
    return runner.log


def test_one_step_in_flight_is_computed_and_booked_before_the_next_is_planned():
    assert run(1, [make_plan(0), make_plan(1)]) == [
        "launch r0",
        "result r0",
        "book r0",
        "launch r1",
        "result r1",
        "book r1",
    ]


def test_the_next_step_is_launched_before_the_last_one_is_waited_for():
    assert run(2, [make_plan(0), make_plan(1), make_plan(2)]) == [
        "launch r0",
        "launch r1",
        "result r0",
        "book r0",
        "launch r2",
        "result r1",
        "book r1",
        "result r2",
        "book r2",
    ]


def test_a_pipeline_of_three_stages_has_a_step_in_each_before_it_waits():
    assert run(3, [make_plan(0), make_plan(1), make_plan(2), make_plan(3)]) == [
        "launch r0",
        "launch r1",
        "launch r2",
        "result r0",
        "book r0",
        "launch r3",
        "result r1",
        "book r1",
        "result r2",
        "book r2",
        "result r3",
        "book r3",
    ]


def test_a_lone_step_is_waited_for_at_once():
    assert run(2, [make_plan(0), None, make_plan(1), None]) == [
        "launch r0",
        "result r0",
        "book r0",
        "launch r1",
        "result r1",
        "book r1",
    ]


def test_an_idle_pipeline_says_so():
    pipeline = StepPipeline(LoggingRunner(2), lambda: None)
    assert pipeline.is_empty
    assert pipeline.turn() is None


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_plan_that_the_runner_refuses_ends_the_turn(max_steps_in_flight: int):
    class RefusingRunner:
        def __init__(self) -> None:
            self.max_steps_in_flight = max_steps_in_flight

        def launch(self, plan: StepPlan) -> PendingStep:
            raise ValueError("no")

    pipeline = StepPipeline(RefusingRunner(), lambda: make_plan(0))
    with pytest.raises(ValueError, match="no"):
        pipeline.turn()
    assert pipeline.is_empty


def test_a_poll_launches_ahead_and_takes_no_result_of_a_step_that_still_runs():
    plans = [make_plan(0), make_plan(1), make_plan(2)]
    runner = LoggingRunner(2)
    pipeline = StepPipeline(runner, lambda: plans.pop(0) if plans else None)
    assert pipeline.oldest is None
    assert pipeline.poll() is None
    assert pipeline.poll() is None
    assert runner.log == ["launch r0", "launch r1"]
    assert pipeline.oldest is not None
    assert not pipeline.oldest.is_over()


def test_a_poll_ends_one_step_that_is_over_and_leaves_the_next_launch_to_the_next_poll():
    plans = [make_plan(0), make_plan(1), make_plan(2)]
    runner = LoggingRunner(2)
    pipeline = StepPipeline(runner, lambda: plans.pop(0) if plans else None)
    pipeline.poll()
    runner.is_over = True
    ended = pipeline.poll()
    assert ended is not None
    assert ended.plan.slices[0].request.request_id == "r0"
    assert runner.log == ["launch r0", "launch r1", "result r0"]
    pipeline.poll()
    assert runner.log[3:] == ["launch r2", "result r1"]


def test_a_poll_of_an_idle_pipeline_ends_nothing():
    assert StepPipeline(LoggingRunner(2), lambda: None).poll() is None
