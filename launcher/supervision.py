"""When to restart a replica: pure decisions over times that the caller brings."""

FROZEN_LEASES = 3.0
"""A replica that lives without its lease for this many lease times is frozen."""
STOOD_STILL_S = 3.0
"""One who looks this late stood still himself, as on a paused machine: he judges nobody yet."""


class BackOff:
    """How long to wait before the next start: doubling, forgotten after a healthy life."""

    def __init__(
        self, first_s: float = 0.25, longest_s: float = 10.0, healthy_after_s: float = 30.0
    ) -> None:
        """Takes the first and the longest wait, and the life after which all is forgiven."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._healthy_after_s = healthy_after_s
        self._num_failures = 0

    def next_delay_s(self, lived_s: float) -> float:
        """Notes an unexpected end after `lived_s` and returns the wait before the next start."""
        if lived_s >= self._healthy_after_s:
            self._num_failures = 0
        # 2**16 is past every longest wait; an unbounded power overflows after a thousand failures.
        delay_s = self._first_s * 2.0 ** min(self._num_failures, 16)
        self._num_failures += 1
        return min(delay_s, self._longest_s)


class LeaseWatch:
    """Tells a frozen replica from a starting one and from a registry that is down.

    starting -> registered -> missing -> frozen; an outage of the registry stops the clock.
    """

    def __init__(self, lease_s: float, start_timeout_s: float, now_s: float) -> None:
        """Begins to watch a replica that has just been started."""
        self._lease_s = lease_s
        self._start_timeout_s = start_timeout_s
        self._last_seen_s = now_s
        self._was_registered = False

    def observe(self, now_s: float, *, is_registered: bool) -> None:
        """Notes what the registry said."""
        if is_registered:
            self._was_registered = True
            self._last_seen_s = now_s

    def observe_outage(self, now_s: float) -> None:
        """Notes that the registry did not answer: nobody's silence counts until it does."""
        self._last_seen_s = now_s

    def is_frozen(self, now_s: float) -> bool:
        """Says whether the replica has been silent for too long."""
        limit_s = FROZEN_LEASES * self._lease_s if self._was_registered else self._start_timeout_s
        return now_s - self._last_seen_s > limit_s
