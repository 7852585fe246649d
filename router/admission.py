"""How many requests the router takes: a bounded number waiting, a bounded number in flight."""

from dataclasses import dataclass

from pdserve.errors import Overloaded


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedLoad:
    """Requests that were admitted and have not ended."""

    num_in_flight: int = 0
    num_waiting: int = 0
    """Of these: no worker has them."""


class Admission:
    """Counts requests from arrival to their terminal event.

        arrived -> waiting (no worker has it yet) -> running -> gone
                      ^____________________________|  returned or orphaned

    A returned request may wait again without asking: it was admitted once.
    """

    def __init__(self, max_queued: int, max_in_flight: int) -> None:
        """Takes the limits of a router: of all its fronts together."""
        self._max_queued = max_queued
        self._max_in_flight = max_in_flight
        self._recent_service_s = 1.0
        self.num_in_flight = 0
        self.num_waiting = 0
        self.others = AdmittedLoad()
        """Of the other fronts, as they said a moment ago."""

    @property
    def load(self) -> AdmittedLoad:
        """Of this front."""
        return AdmittedLoad(num_in_flight=self.num_in_flight, num_waiting=self.num_waiting)

    def admit(self) -> None:
        """Counts a new request as waiting.

        Raises:
            Overloaded: a limit is reached; the hint is the mean time until a place becomes free.
        """
        num_in_flight = self.num_in_flight + self.others.num_in_flight
        if num_in_flight >= self._max_in_flight:
            raise Overloaded(
                f"{num_in_flight} requests are in flight, the limit is {self._max_in_flight}",
                self.retry_after_s,
            )
        num_waiting = self.num_waiting + self.others.num_waiting
        if num_waiting >= self._max_queued:
            raise Overloaded(
                f"{num_waiting} requests are waiting, the limit is {self._max_queued}",
                self.retry_after_s,
            )
        self.num_in_flight += 1
        self.num_waiting += 1

    @property
    def retry_after_s(self) -> float:
        """Seconds until one of the requests in flight probably ends."""
        per_place_s = self._recent_service_s / max(self.num_in_flight, 1)
        return min(max(per_place_s, 0.05), 30.0)

    def start(self) -> None:
        """Moves a request from waiting to running."""
        assert self.num_waiting > 0
        self.num_waiting -= 1

    def wait_again(self) -> None:
        """Moves a request from running back to waiting."""
        self.num_waiting += 1
        assert self.num_waiting <= self.num_in_flight

    def leave(self, *, is_waiting: bool, service_s: float) -> None:
        """Forgets a request after its terminal event."""
        assert self.num_in_flight > 0
        self.num_in_flight -= 1
        if is_waiting:
            self.start()
        self._recent_service_s += 0.1 * (service_s - self._recent_service_s)
