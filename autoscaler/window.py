"""Figures of the last minutes: rates of counters, means of gauges, and whether they rise."""

from bisect import bisect_left
from collections import deque
from itertools import pairwise

_NUM_PARTS = 4


class Window:
    """Samples of one figure over time. One thread."""

    def __init__(self, keep_s: float) -> None:
        """Forgets what is older than `keep_s`."""
        self._keep_s = keep_s
        self._times: deque[float] = deque()
        self._values: deque[float] = deque()

    def add(self, now_s: float, value: float) -> None:
        """Takes a sample; times never go back."""
        self._times.append(now_s)
        self._values.append(value)
        while now_s - self._times[0] > self._keep_s:
            self._times.popleft()
            self._values.popleft()

    def clear(self) -> None:
        """Forgets everything."""
        self._times.clear()
        self._values.clear()

    @property
    def last(self) -> float:
        """The newest sample; 0 before the first."""
        return self._values[-1] if self._values else 0.0

    def mean(self, over_s: float) -> float:
        """Returns the mean of the last seconds; 0 before the first sample."""
        found = self._since(over_s)
        return sum(found) / len(found) if found else 0.0

    def ago(self, seconds: float) -> float:
        """Returns the sample of so long ago, or the oldest that is kept; 0 before the first."""
        if not self._times:
            return 0.0
        return self._values[bisect_left(self._times, self._times[-1] - seconds)]

    def rise_since(self, seconds: float) -> float:
        """Returns how much larger the newest sample is than the one of so long ago."""
        return self.last - self.ago(seconds)

    def largest(self, over_s: float) -> float:
        """Returns the largest of the last seconds; 0 before the first sample."""
        return max(self._since(over_s), default=0.0)

    def least(self) -> float:
        """Returns the smallest of all that is kept; 0 before the first sample."""
        return min(self._values, default=0.0)

    def has_fallen(self) -> bool:
        """Says whether the newest sample is below the oldest that is kept."""
        return bool(self._values) and self._values[-1] < self._values[0]

    def span_s(self) -> float:
        """Returns how long ago the oldest sample is."""
        return self._times[-1] - self._times[0] if self._times else 0.0

    def mean_rise(self, over_s: float) -> float:
        """Returns how much the figure rises per second, if it did so all the time; else 0.

        The time is cut into four parts, and the least rise between two of them counts: a step is
        within one of them, a climb is in all.
        """
        if self.span_s() < over_s:
            return 0.0
        part_s = over_s / _NUM_PARTS
        end_s = self._times[-1]
        sums, counts = [0.0] * _NUM_PARTS, [0] * _NUM_PARTS
        start = bisect_left(self._times, end_s - over_s)
        for index in range(start, len(self._times)):
            part = min(int((self._times[index] - (end_s - over_s)) / part_s), _NUM_PARTS - 1)
            sums[part] += self._values[index]
            counts[part] += 1
        if not all(counts):
            return 0.0
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        return max(0.0, min(later - earlier for earlier, later in pairwise(means)) / part_s)

    def _since(self, over_s: float) -> list[float]:
        if not self._times:
            return []
        start = bisect_left(self._times, self._times[-1] - over_s)
        return [self._values[index] for index in range(start, len(self._values))]


class CounterWindow:
    """The rate of a counter that starts anew when its owner does."""

    def __init__(self, keep_s: float) -> None:
        """Forgets what is older than `keep_s`."""
        self._rates = Window(keep_s)
        self._totals = Window(keep_s)
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, count: float) -> None:
        """Takes what the counter says."""
        if self._last is not None:
            since_s, before = self._last
            if now_s <= since_s:
                return
            # A counter that fell has started anew: what it says came since then.
            grown = count - before if count >= before else count
            self._rates.add(now_s, grown / (now_s - since_s))
            self._totals.add(now_s, self._totals.last + grown)
        else:
            self._totals.add(now_s, 0.0)
        self._last = (now_s, count)

    def grown(self, over_s: float) -> float:
        """Returns how much came in the last seconds, or since the first look."""
        return self._totals.rise_since(over_s)

    def per_s(self, over_s: float) -> float:
        """Returns the mean rate of the last seconds."""
        return self._rates.mean(over_s)

    def rise(self, over_s: float) -> float:
        """Returns how much the rate rises per second; see `Window.mean_rise`."""
        return self._rates.mean_rise(over_s)
