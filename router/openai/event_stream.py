"""One Server-Sent-Events answer: starts late, pings while nothing comes, never waits for ever."""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from starlette.types import Send

logger = logging.getLogger(__name__)

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
PING_INTERVAL_S = 10.0
"""Proxies and clients give up on a connection that is silent for long."""
STALL_LIMIT_S = 60.0
"""A client that takes nothing at all for this long is cut."""
_TICK_S = 1.0
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would gather the events otherwise.
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Writes events; the status line goes out with the first of them, or with a ping.

    async with EventStream(send, abort) as stream: ...
    """

    def __init__(
        self,
        send: Send,
        abort: Callable[[], None],
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        """Takes the ASGI channel, and what resets the connection."""
        self._send = send
        self._abort = abort
        self._ping_interval_s = ping_interval_s
        self._num_sending = 0
        self._changed_s = 0.0
        self._watch: asyncio.Task[None] | None = None
        self.is_started = False
        """The status is out; an error can only be an event now."""

    async def __aenter__(self) -> Self:
        self._changed_s = asyncio.get_running_loop().time()
        self._watch = asyncio.create_task(self._keep_alive(), name="event-stream")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.wait((self._watch,))

    async def write(self, events: bytes) -> None:
        """Sends whole events; waits while the client's window is full."""
        await self._transmit(events, more_body=True)

    async def close(self) -> None:
        """Ends the answer."""
        await self._transmit(b"", more_body=False)

    def interrupt(self) -> None:
        """Resets the connection if a write is stuck; the answer ended behind the client's back."""
        if self._num_sending:
            self._abort()

    def reset(self) -> None:
        """Resets the connection."""
        self._abort()

    async def _transmit(self, body: bytes, *, more_body: bool) -> None:
        loop = asyncio.get_running_loop()
        self._num_sending += 1
        self._changed_s = loop.time()
        try:
            if not self.is_started:
                self.is_started = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
                )
            await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
        finally:
            self._num_sending -= 1
            self._changed_s = loop.time()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        tick_s = min(_TICK_S, self._ping_interval_s)
        while True:
            await asyncio.sleep(tick_s)
            quiet_s = loop.time() - self._changed_s
            if self._num_sending and quiet_s > STALL_LIMIT_S:
                logger.info("client cut: it takes nothing", extra={"stall_s": quiet_s})
                self._abort()
            elif not self._num_sending and quiet_s >= self._ping_interval_s:
                await self._transmit(PING, more_body=True)
