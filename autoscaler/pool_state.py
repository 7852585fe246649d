"""What is remembered of a pool between decisions: its needs, and when it changed. Pure."""

from math import inf

from autoscaler.figures import PoolNumbers
from autoscaler.settings import ScalingSettings
from autoscaler.window import Window

_MOST_PATIENCE = 4
"""Times `settle_s`."""


class PoolState:
    """One pool. One thread."""

    def __init__(self, settings: ScalingSettings) -> None:
        """Has seen nothing."""
        self.numbers = PoolNumbers()
        self.survivors = Window(_MOST_PATIENCE * settings.settle_s)
        """Needs with the margin, one a tick."""
        self.needs = Window(settings.confirm_s)
        """Without it, one a tick."""
        self.grown_s: float | None = None
        self.started_s: float | None = None
        """When last some replica of the pool was starting."""
        self.changed_s: float | None = None
        self.settle_s = settings.settle_s
        self._shrunk_s: float | None = None
        self._overdue_since_s: float | None = None

    def is_overdue(self, now_s: float, settings: ScalingSettings, ages: Window) -> bool:
        """Requests wait too long although all that was ordered is there, and had time to help.

        To be asked with each tick: it remembers since when.
        """
        if self.numbers.num_starting or self.numbers.oldest_s <= settings.ttft_s:
            self._overdue_since_s = None
            return False
        if self._overdue_since_s is None:
            self._overdue_since_s = now_s
        if now_s - self._overdue_since_s < settings.overdue_s or ages.has_fallen():
            return False
        last_s = max(self.grown_s or -inf, self.started_s or -inf)
        return now_s - last_s > settings.catch_up_s

    def has_settled(self, now_s: float, settings: ScalingSettings) -> bool:
        """Says whether its needs were seen for long enough, and nothing has changed meanwhile."""
        if self.survivors.span_s() < self.settle_s:
            return False
        if self.grown_s is not None and now_s - self.grown_s < self.settle_s:
            return False
        return self.changed_s is None or now_s - self.changed_s >= settings.shrink_pause_s

    def note_growth(self, now_s: float, settings: ScalingSettings) -> None:
        """Notes that more replicas were ordered."""
        if self._shrunk_s is not None and now_s - self._shrunk_s <= 2 * self.settle_s:
            # It was too small for what came: next time it waits longer.
            self.settle_s = min(2 * self.settle_s, _MOST_PATIENCE * settings.settle_s)
        self._shrunk_s = None
        self.grown_s = self.changed_s = now_s

    def note_shrinking(self, now_s: float, settings: ScalingSettings) -> None:
        """Notes that replicas were told to leave."""
        if self.changed_s is not None and now_s - self.changed_s > 2 * self.settle_s:
            self.settle_s = settings.settle_s
        self._shrunk_s = self.changed_s = now_s
