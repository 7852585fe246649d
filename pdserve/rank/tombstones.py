"""Remembers cancelled requests, so that a Submit that arrives after its Cancel is refused."""

from collections.abc import Iterable

from pdserve.errors import StaleAttempt
from pdserve.request import Request, RequestId
from pdserve.timeline import Clock

KEEP_S = 60.0


class Tombstones:
    """The highest cancelled attempt of each request, for a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancelled: dict[RequestId, tuple[int, float]] = {}

    def add(self, request_id: RequestId, attempt: int) -> None:
        """Fences this attempt and older ones."""
        known, _ = self._cancelled.pop(request_id, (0, 0.0))
        self._cancelled[request_id] = (max(known, attempt), self._clock.now())

    def check(self, request: Request) -> None:
        """Refuses a fenced attempt.

        Raises:
            StaleAttempt: this attempt was cancelled before it came.
        """
        if self.covers(request):
            raise StaleAttempt(f"attempt {request.attempt} of {request.request_id} was cancelled")

    def covers(self, request: Request) -> bool:
        """Says whether this attempt is fenced."""
        attempt, _ = self._cancelled.get(request.request_id, (0, 0.0))
        return request.attempt <= attempt

    def covers_all(self, requests: Iterable[Request]) -> bool:
        """Says whether all of these are fenced: of a group, nobody is left who wants it."""
        return all(self.covers(request) for request in requests)

    def expire(self) -> None:
        """Forgets what is over a minute old; entries are in the order of their time."""
        limit = self._clock.now() - KEEP_S
        for request_id, (_, at_s) in list(self._cancelled.items()):
            if at_s > limit:
                return
            del self._cancelled[request_id]
