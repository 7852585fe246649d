"""How fast replicas compute prompts, from what comes and what waits: without a predictor."""

from autoscaler.figures import WorkerFigures

_KEEP_S = 60.0
"""After so long, what was seen weighs half."""
_WARM_UP_S = 10.0
"""A pool that has just changed says nothing: new replicas are cold."""
_LEAST_BUSY_S = 8.0
"""So many seconds of work make a speed."""


class SpeedMeter:
    """Prompt tokens per second of a busy replica. One thread."""

    def __init__(self) -> None:
        """Has seen nothing."""
        self._tokens = 0.0
        self._busy_s = 0.0
        self._last: tuple[float, float] | None = None
        self._ids: frozenset[str] = frozenset()
        self._changed_s = 0.0

    def note(
        self,
        now_s: float,
        workers: list[WorkerFigures],
        prompt_tokens: int,
        backlog_tokens: int,
        num_busy: int,
    ) -> None:
        """Takes figures.

        Args:
            now_s: time of the call.
            workers: those that serve.
            prompt_tokens: of all that ever arrived.
            backlog_tokens: of those that wait.
            num_busy: replicas that have work.
        """
        ids = frozenset(worker.worker_id for worker in workers)
        if ids != self._ids:
            self._ids, self._changed_s = ids, now_s
        done = prompt_tokens - backlog_tokens
        last, self._last = self._last, (now_s, done)
        if last is None or now_s - self._changed_s < _WARM_UP_S or now_s <= last[0]:
            return
        if num_busy == 0 and done <= last[1]:
            return
        passed_s = now_s - last[0]
        keep = 0.5 ** (passed_s / _KEEP_S)
        self._tokens = self._tokens * keep + done - last[1]
        self._busy_s = self._busy_s * keep + num_busy * passed_s

    @property
    def tokens_per_s(self) -> float | None:
        """Of one replica that is busy; None before enough was seen."""
        if self._busy_s < _LEAST_BUSY_S or self._tokens <= 0:
            return None
        return self._tokens / self._busy_s
