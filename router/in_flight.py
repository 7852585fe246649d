"""Requests between admission and their terminal event, and how workers' messages find them."""

import asyncio

from pdserve.request import RequestId
from router.active import ActiveRequest, ClientCall


class InFlight:
    """All requests in flight. The dispatcher puts them in, their endings take them out."""

    def __init__(self) -> None:
        """Starts empty."""
        self.calls: dict[RequestId, ClientCall] = {}
        self.samples: dict[str, ActiveRequest] = {}
        """By the ids under which workers speak of them."""
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, call: ClientCall) -> None:
        """Takes a request that was admitted."""
        self.calls[call.request_id] = call
        self._idle.clear()

    def remove(self, call: ClientCall) -> bool:
        """Forgets a request; False when it was not there, or is another of the same id."""
        if self.calls.get(call.request_id) is not call:
            return False
        del self.calls[call.request_id]
        if not self.calls:
            self._idle.set()
        return True

    def has(self, active: ActiveRequest) -> bool:
        """Says whether a sample is in flight; one that ended may have a successor of its id."""
        return self.samples.get(active.state.request_id) is active

    async def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()
