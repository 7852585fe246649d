"""Time: the injected clock, and the stages a request passes through."""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds; tests and simulation pass their own."""

    def now(self) -> float:
        """Returns seconds since an arbitrary origin; never goes back."""
        ...


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        """Returns `time.monotonic()`."""
        return time.monotonic()


@dataclass
class ManualClock:
    """A clock that moves only when told to."""

    time_s: float = 0.0

    def now(self) -> float:
        """Returns the time set last."""
        return self.time_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        assert seconds >= 0
        self.time_s += seconds
