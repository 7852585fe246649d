"""Tells a frozen rank from a busy one by the counter that its step loop moves. Pure."""

from dataclasses import dataclass, field

from pdserve.timeline import Clock, PauseWatch


@dataclass(slots=True)
class ProgressMonitor:
    """Watches one rank's progress counter.

    The counter moves with every turn of the step loop, idle turns included, and travels with the
    heartbeat that the same loop sends. A face that merely answers says nothing about its rank.
    """

    clock: Clock
    frozen_after_s: float
    """Shortest silence that counts as frozen."""
    _progress: int = 0
    _predicted_step_s: float = 0.0
    _moved_at_s: float = field(init=False)
    _own_pause: PauseWatch = field(init=False)

    def __post_init__(self) -> None:
        """Counts from now."""
        self._moved_at_s = self.clock.now()
        self._own_pause = PauseWatch(self.frozen_after_s / 2, self._moved_at_s)

    def look(self) -> bool:
        """Judges the rank; called many times within `frozen_after_s`.

        If this process itself stood still since the last look (a paused machine), what the rank
        said meanwhile has not been read yet: its silence counts from now.
        """
        now_s = self.clock.now()
        if self._own_pause.look(now_s):
            self._moved_at_s = now_s
        return self.is_frozen

    def observe(self, progress: int, predicted_step_s: float) -> None:
        """Takes a heartbeat."""
        self._predicted_step_s = predicted_step_s
        if progress != self._progress:
            self._progress = progress
            self._moved_at_s = self.clock.now()

    @property
    def limit_s(self) -> float:
        """How long the counter may stand still: max(frozen_after, 4 x predicted step)."""
        return max(self.frozen_after_s, 4 * self._predicted_step_s)

    @property
    def silence_s(self) -> float:
        """How long the counter has stood still."""
        return self.clock.now() - self._moved_at_s

    @property
    def is_frozen(self) -> bool:
        """True once the silence is longer than the limit."""
        return self.silence_s > self.limit_s
