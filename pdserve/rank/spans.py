"""Spans of a rank: its steps, and how long events wait before the engine thread takes them."""

from collections.abc import Callable

from pdserve.engine.batch import PendingStep, StepPlan, StepResult, StepRunner
from pdserve.rank.step_loop import Engine
from pdserve.rpc.v1 import rank_pb2
from pdserve.spans import Detail, SpanLog
from pdserve.timeline import Clock

Describe = Callable[[object], dict[str, Detail]]
"""What to say of an event: its `event` and whose it is; empty for one that is of no interest."""


class SpanRunner:
    """A `StepRunner` whose steps are noted."""

    def __init__(self, runner: StepRunner, spans: SpanLog, clock: Clock) -> None:
        """Wraps a runner."""
        self._runner = runner
        self._spans = spans
        self._clock = clock

    @property
    def max_steps_in_flight(self) -> int:
        """As of the runner."""
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launches, and notes what the launch took on the host."""
        started_s = self._clock.now()
        pending = self._runner.launch(plan)
        self._note("launch", plan, started_s)
        return _SpanStep(pending, lambda: self._note("step", plan, started_s))

    def _note(self, name: str, plan: StepPlan, started_s: float) -> None:
        self._spans.note(
            name,
            started_s,
            self._clock.now(),
            requests=[part.request.request_id for part in plan.slices],
            num_tokens=plan.num_tokens,
        )


class _SpanStep:
    def __init__(self, pending: PendingStep, on_end: Callable[[], None]) -> None:
        self._pending = pending
        self._on_end = on_end

    def is_over(self) -> bool:
        return self._pending.is_over()

    def wait(self) -> None:
        self._pending.wait()

    def result(self) -> StepResult:
        result = self._pending.result()
        self._on_end()
        return result


class SpanEngine:
    """An `Engine` whose events are noted as they are taken."""

    def __init__(self, engine: Engine, describe: Describe, spans: SpanLog, clock: Clock) -> None:
        """Wraps an engine."""
        self._engine = engine
        self._describe = describe
        self._spans = spans
        self._clock = clock

    def handle(self, event: object) -> None:
        """Takes an event, and notes what that took."""
        started_s = self._clock.now()
        self._engine.handle(event)
        details = self._describe(event)
        if details:
            self._spans.note("handle", started_s, self._clock.now(), **details)

    @property
    def awaited(self) -> PendingStep | None:
        """Passes it on."""
        return self._engine.awaited

    def tick(self) -> None:
        """Passes it on."""
        self._engine.tick()

    def step(self) -> bool:
        """Passes it on."""
        return self._engine.step()

    def pause_s(self) -> float:
        """Passes it on."""
        return self._engine.pause_s()

    def describe(self) -> rank_pb2.RankHeartbeat:
        """Passes it on."""
        return self._engine.describe()

    def close(self) -> None:
        """Passes it on."""
        self._engine.close()


def post_noter(describe: Describe, spans: SpanLog, clock: Clock) -> Callable[[object], None]:
    """Returns what notes each event at the moment at which it is posted to an inbox."""

    def note(event: object) -> None:
        details = describe(event)
        if details:
            now_s = clock.now()
            spans.note("posted", now_s, now_s, **details)

    return note
