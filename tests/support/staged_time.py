"""A pipeline as a timetable: when each stage computes each step; nothing is computed."""

from collections import deque
from dataclasses import dataclass, field

from pdserve.engine.batch import StepPlan, StepResult
from pdserve.request import RequestId, SampledToken


@dataclass
class TimetableStep:
    runner: "TimetableRunner"
    plan: StepPlan
    end: float

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def result(self) -> StepResult:
        runner = self.runner
        assert runner.flying.popleft() is self
        runner.now = max(runner.now, self.end)
        return StepResult(
            sampled={
                one.request_id: SampledToken(token_id=7)
                for part in self.plan.slices
                if part.output_index is not None
                for one in part.request.samples()
            }
        )


@dataclass
class TimetableRunner:
    """Each stage takes as long as a step has tokens, but `least` at the least.

    Without feeding, stage 0 is the host itself, as on a CPU; with it, the host only launches.
    """

    num_stages: int
    feeds_tokens: bool
    least: float = 1.0
    now: float = 0.0
    busy: list[float] = field(default_factory=list)
    flying: deque[TimetableStep] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)
    _free: list[float] = field(default_factory=list)
    _sampled: dict[RequestId, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = [0.0] * self.num_stages
        self.busy = [0.0] * self.num_stages

    @property
    def max_steps_in_flight(self) -> int:
        return 2 * self.num_stages if self.feeds_tokens else self.num_stages

    def launch(self, plan: StepPlan) -> TimetableStep:
        took = max(self.least, plan.num_tokens / 100)
        at = self.now
        for part in plan.slices:
            if part.awaits_token:
                at = max(at, self._sampled[part.request.request_id])
        for stage in range(self.num_stages):
            at = max(at, self._free[stage]) + took
            self._free[stage] = at
            self.busy[stage] += took
            if stage == 0 and not self.feeds_tokens:
                self.now = at
        for part in plan.slices:
            if part.output_index is not None:
                self._sampled[part.request.request_id] = at
        step = TimetableStep(self, plan, at)
        self.flying.append(step)
        self.plans.append(plan)
        return step
