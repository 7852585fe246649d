"""Keeps a device at work: the next step is launched before the last one's tokens are here.

    turn:  plan k+1, launch k+1, wait for k     (the engine books and streams k while k+1 runs)
    turn:  plan k+2, launch k+2, wait for k+1
    turn:  nothing to plan, wait for k+2        (a lone step is not delayed by the room for another)

With a runner of one step in flight, a turn plans, computes and returns one step. One of several
stages has a step in flight for each of them, made of other sequences or of later chunks:

    stage 0:  k    k+1  k+2  k+3
    stage 1:       k    k+1  k+2
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.batch import PendingStep, StepPlan, StepResult, StepRunner


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step whose result is here; the caller books it before the next turn."""

    plan: StepPlan
    result: StepResult


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    plan: StepPlan
    pending: PendingStep


class StepPipeline:
    """Steps between a scheduler and a runner. Engine thread only."""

    def __init__(
        self,
        runner: StepRunner,
        plan_step: Callable[[], StepPlan | None],
        note_launched: Callable[[StepPlan], None] | None = None,
    ) -> None:
        """Launches nothing yet.

        Args:
            runner: computes steps.
            plan_step: plans the next one, while others are in flight; None: not now.
            note_launched: called with each plan that was launched.
        """
        self._runner = runner
        self._plan_step = plan_step
        self._note_launched = note_launched
        self._launched: deque[_LaunchedStep] = deque()

    @property
    def is_empty(self) -> bool:
        """Says that no step is in flight."""
        return not self._launched

    @property
    def oldest(self) -> PendingStep | None:
        """The step whose result is taken next; None if nothing is in flight."""
        return self._launched[0].pending if self._launched else None

    @property
    def num_tokens_in_flight(self) -> int:
        """Tokens of all steps in flight."""
        return sum(launched.plan.num_tokens for launched in self._launched)

    def poll(self) -> EndedStep | None:
        """Launches as many steps as may and can be, and ends the oldest one if it is over.

        Returns:
            That one; None if it is not over, or nothing is in flight.

        Raises:
            ValueError: the runner refuses a plan.
        """
        self._launch()
        if not self._launched or not self._launched[0].pending.is_over():
            return None
        return self._end_oldest()

    def turn(self) -> EndedStep | None:
        """Launches as many steps as may and can be, then waits for the oldest one.

        Returns:
            That one; None if nothing was in flight and nothing could be planned.

        Raises:
            ValueError: the runner refuses a plan.
        """
        self._launch()
        return self._end_oldest() if self._launched else None

    def _launch(self) -> None:
        while len(self._launched) < self._runner.max_steps_in_flight:
            plan = self._plan_step()
            if plan is None:
                return
            self._launched.append(_LaunchedStep(plan, self._runner.launch(plan)))
            if self._note_launched is not None:
                self._note_launched(plan)

    def _end_oldest(self) -> EndedStep:
        oldest = self._launched.popleft()
        return EndedStep(oldest.plan, oldest.pending.result())
