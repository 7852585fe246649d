"""What a client sees of one stream, as events: pure, on times that are passed in.

TTFT is one event of a request, ITL one of each later message with tokens. A request that met its
objectives is one more event, `goodput`, so that the rate of those events is the goodput.
"""

from dataclasses import dataclass

GENERATE, TTFT, ITL, GOODPUT = "Generate", "TTFT", "ITL", "goodput"
"""Names in the statistics of locust."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """What a request must hold to count as good."""

    ttft_s: float
    tpot_s: float
    """Mean time per output token after the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line for the statistics."""

    name: str
    seconds: float
    num_tokens: int


class Meter:
    """Watches one request."""

    def __init__(self, objectives: Objectives, start_s: float) -> None:
        """The request is sent now."""
        self._objectives = objectives
        self._start_s = start_s
        self._first_s: float | None = None
        self._last_s = start_s
        self.num_tokens = 0

    def take_tokens(self, now_s: float, num_tokens: int) -> Event | None:
        """Notes a message; one without tokens is no event."""
        if num_tokens == 0:
            return None
        self.num_tokens += num_tokens
        if self._first_s is None:
            self._first_s = self._last_s = now_s
            return Event(name=TTFT, seconds=now_s - self._start_s, num_tokens=num_tokens)
        gap_s, self._last_s = now_s - self._last_s, now_s
        return Event(name=ITL, seconds=gap_s, num_tokens=num_tokens)

    def finish(self, now_s: float) -> list[Event]:
        """Notes the completion: the whole request, and whether it was a good one."""
        whole = Event(name=GENERATE, seconds=now_s - self._start_s, num_tokens=self.num_tokens)
        if not self._is_good():
            return [whole]
        return [whole, Event(name=GOODPUT, seconds=whole.seconds, num_tokens=self.num_tokens)]

    def _is_good(self) -> bool:
        if self._first_s is None:
            return False
        ttft_s = self._first_s - self._start_s
        # Tokens of the first message came together: they cost nothing after the first.
        tpot_s = (self._last_s - self._first_s) / max(1, self.num_tokens - 1)
        return ttft_s <= self._objectives.ttft_s and tpot_s <= self._objectives.tpot_s
