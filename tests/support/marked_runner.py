"""A model on a CPU whose steps are marked as on a GPU: their KV is there before they have ended."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.batch import PendingStep, StepPlan, StepResult
from pdserve.engine.model_runner import ModelRunner
from tests.support.late_runner import LateRunner


@dataclass(eq=False)
class MarkedStep:
    """Computed when somebody waits for it; its result is taken later."""

    number: int
    pending: PendingStep
    on_computed: Callable[[], None]
    computed: StepResult | None = None

    def is_reached(self) -> bool:
        return self.computed is not None

    def is_over(self) -> bool:
        return self.computed is not None

    def wait(self) -> None:
        if self.computed is None:
            self.computed = self.pending.result()
            self.on_computed()

    def result(self) -> StepResult:
        self.wait()
        assert self.computed is not None
        return self.computed


class MarkedRunner:
    """A `StepRunner` with two steps in flight, and the `KvMarks` in them."""

    max_steps_in_flight = 2

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = LateRunner(runner)
        self._steps: deque[MarkedStep] = deque(maxlen=self.max_steps_in_flight + 1)
        self.newest = 0
        self.on_computed: Callable[[], None] = lambda: None
        """Called when a step is computed, before its result is taken."""

    def launch(self, plan: StepPlan) -> MarkedStep:
        self.newest += 1
        step = MarkedStep(self.newest, self._runner.launch(plan), lambda: self.on_computed())
        self._steps.append(step)
        return step

    def find(self, step: int, end_layer: int) -> MarkedStep | None:
        assert step <= self.newest
        return next((one for one in self._steps if one.number == step), None)
