"""How much prompts differ in length, from two counters alone: requests and their tokens. Pure.

Between two looks k requests of t tokens come. If lengths are independent, (t - k m)^2 / k is their
variance on the mean, however the rate of requests changes meanwhile; m is the mean length. Summed
over n looks that is (sum of t^2 / k - (sum of t)^2 / (sum of k)) / n.
"""

_KEEP_S = 300.0
"""After so long, what was seen weighs half."""
_LEAST_REQUESTS = 16


class LengthMeter:
    """The variance of prompt lengths over the square of their mean. One thread."""

    def __init__(self) -> None:
        """Has seen nothing."""
        self._last: tuple[float, int, int] | None = None
        self._looks = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._squares = 0.0

    def note(self, now_s: float, num_arrived: int, prompt_tokens: int) -> None:
        """Takes what the counters say; they start anew when their owner does."""
        last, self._last = self._last, (now_s, num_arrived, prompt_tokens)
        if last is None or num_arrived < last[1] or prompt_tokens < last[2]:
            return
        keep = 0.5 ** ((now_s - last[0]) / _KEEP_S)
        count, tokens = num_arrived - last[1], prompt_tokens - last[2]
        self._looks = self._looks * keep + (count > 0)
        self._requests = self._requests * keep + count
        self._tokens = self._tokens * keep + tokens
        self._squares = self._squares * keep + (tokens * tokens / count if count else 0.0)

    @property
    def variability(self) -> float:
        """0: all are of one length; 1: they vary as exponential ones do."""
        if self._requests < _LEAST_REQUESTS or self._tokens <= 0:
            return 0.0
        variance = (self._squares - self._tokens * self._tokens / self._requests) / self._looks
        mean = self._tokens / self._requests
        return max(variance, 0.0) / (mean * mean)
