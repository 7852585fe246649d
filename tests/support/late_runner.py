"""A model on a CPU that behaves like one on a device: two steps in flight, computed at the end.

A step is computed when its result is asked for: all that the host did since the launch to blocks
that the step uses is done by then, and would show in its tokens.
"""

from collections import deque
from dataclasses import dataclass, replace

from pdserve.engine.batch import SequenceSlice, StepPlan, StepResult
from pdserve.engine.model_runner import ModelRunner
from pdserve.request import RequestId, SampledToken


@dataclass(eq=False)
class _LateStep:
    runner: "LateRunner"
    plan: StepPlan

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """Computed by `result`."""

    def result(self) -> StepResult:
        return self.runner.end(self)


class LateRunner:
    """A `StepRunner` over a runner of a CPU."""

    max_steps_in_flight = 2

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._flying: deque[_LateStep] = deque()
        self._sampled: dict[RequestId, SampledToken] = {}
        self.num_awaited = 0

    def launch(self, plan: StepPlan) -> _LateStep:
        assert len(self._flying) < self.max_steps_in_flight
        step = _LateStep(self, plan)
        self._flying.append(step)
        return step

    def end(self, step: _LateStep) -> StepResult:
        assert self._flying.popleft() is step
        slices = tuple(self._resolve(part) for part in step.plan.slices)
        result = self._runner.run(replace(step.plan, slices=slices))
        self._sampled = result.sampled
        return result

    def _resolve(self, part: SequenceSlice) -> SequenceSlice:
        if not part.awaits_token:
            return part
        self.num_awaited += 1
        token = self._sampled[part.request.request_id].token_id
        return replace(part, token_ids=(*part.token_ids, token), awaits_token=False)
