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


class PauseWatch:
    """Tells one who judges others by their silence that he stood still himself.

    On a paused machine, say. What the others said meanwhile has not been read yet: nobody is
    judged by it.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        """Counts from now.

        Args:
            limit_s: one who looks again only after more than this long stood still.
            now_s: the time.
        """
        self._limit_s = limit_s
        self._looked_at_s = now_s

    def look(self, now_s: float) -> bool:
        """Says whether the last look was too long ago; called whenever somebody may be judged."""
        stood_still = now_s - self._looked_at_s > self._limit_s
        self._looked_at_s = now_s
        return stood_still


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
