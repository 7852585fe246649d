"""When to launch the next decode step: late, so that what lands meanwhile joins it. Pure.

    device        |====== k ======|====== k+1 ======|
    at once     launch k+1 here: ^ what lands during k runs in k+2
    late                launch k+1 here: ^ what lands before runs in k+1

The next step is due when the one in flight has no more than a margin left, by how long the last
ones took. A step that ends earlier than that leaves the device idle for the time of a launch.
"""

from collections import deque

from pdserve.engine.batch import PendingStep, StepPlan, StepRunner
from pdserve.timeline import Clock

MARGIN_S = 0.0004
"""For timers that wake late, beside what a launch takes."""
LAUNCH_SHARE = 1.25
_MEMORY = 0.9
_NUM_STEPS = 3


class JoinWindow:
    """Knows how long steps and launches take. Engine thread only."""

    def __init__(self, clock: Clock) -> None:
        """Knows nothing: launches at once."""
        self._clock = clock
        self._took_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._launch_s = 0.0
        self._running_since_s: float | None = None
        """Since when the oldest step in flight has had the device."""
        self._plan_begun_s = 0.0
        self._num_in_flight = 0

    def begin_plan(self) -> None:
        """Notes that a step is planned now, which may be launched."""
        self._plan_begun_s = self._clock.now()

    def note_launch(self) -> None:
        """Notes that what was planned last was launched."""
        now_s = self._clock.now()
        self._launch_s = max(_MEMORY * self._launch_s, now_s - self._plan_begun_s)
        if not self._num_in_flight:
            self._running_since_s = now_s
        self._num_in_flight += 1

    def note_end(self, plan: StepPlan) -> None:
        """Notes the end of the oldest step."""
        now_s = self._clock.now()
        assert self._running_since_s is not None
        self._num_in_flight -= 1
        if plan.num_tokens == len(plan.slices):
            self._took_s.append(now_s - self._running_since_s)
        else:
            # With chunks of prompts no step is like the next.
            self._took_s.clear()
        self._running_since_s = now_s if self._num_in_flight else None

    def time_left_s(self) -> float:
        """Returns how long the next launch may be put off; nothing or less: it is due."""
        if self._num_in_flight != 1 or len(self._took_s) < _NUM_STEPS:
            return 0.0
        assert self._running_since_s is not None
        # The shortest of the last ones: late is worse than early.
        end_s = self._running_since_s + min(self._took_s)
        return end_s - MARGIN_S - LAUNCH_SHARE * self._launch_s - self._clock.now()


class JoiningRunner:
    """A `StepRunner` that tells a window of its launches."""

    def __init__(self, runner: StepRunner, window: JoinWindow) -> None:
        """Wraps a runner."""
        self._runner = runner
        self._window = window

    @property
    def max_steps_in_flight(self) -> int:
        """As of the runner."""
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launches a step."""
        pending = self._runner.launch(plan)
        self._window.note_launch()
        return pending
