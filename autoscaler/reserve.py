"""What is kept for the next burst: requests that came faster than replicas start may do so again.

The first burst is met late, whatever is done: replicas take longer to start than it takes to come.
From then on, each pool keeps what the rate of the burst needs, without what waited meanwhile;
every burst that comes again renews that, and after a while without one it is let go.
"""

from collections.abc import Callable

from autoscaler.window import Window

_RATIO = 1.5
"""What comes in a burst, over what serves, or over what came before."""


class BurstMemory:
    """Remembers when there last was a burst, and how fast requests came. One thread."""

    def __init__(self, keep_s: float) -> None:
        """Has seen none; remembers each for `keep_s`, and none if that is 0."""
        self._keep_s = keep_s
        self._rates = Window(keep_s)
        self._last_s: float | None = None

    def note(
        self,
        now_s: float,
        requests_per_s: float,
        replicas_for: Callable[[float], int],
        *,
        is_late: bool,
        num_serving: int,
        start_s: float,
    ) -> None:
        """Looks whether this is a burst.

        Args:
            now_s: time of the call.
            requests_per_s: that come.
            replicas_for: says how many replicas, of those that compute prompts, a rate needs.
            is_late: prompts wait past their target.
            num_serving: of those replicas.
            start_s: how long one takes to start.
        """
        self._rates.add(now_s, requests_per_s)
        needed = replicas_for(requests_per_s)
        surprises = is_late and needed >= _RATIO * max(num_serving, 1)
        if surprises or (self._is_kept(now_s) and self._climbs(needed, replicas_for, start_s)):
            self._last_s = now_s

    def peak_per_s(self, now_s: float) -> float:
        """Returns the rate to be ready for; 0 where there was no burst for long."""
        return self._rates.largest(self._keep_s) if self._is_kept(now_s) else 0.0

    def _climbs(self, needed: int, replicas_for: Callable[[float], int], start_s: float) -> bool:
        """A burst that finds its reserve is not late, but comes as fast."""
        return needed >= _RATIO * max(replicas_for(self._rates.ago(2 * start_s)), 1)

    def _is_kept(self, now_s: float) -> bool:
        return self._last_s is not None and now_s - self._last_s < self._keep_s
