"""What waits for one client: bounded by bytes, merged while the client is slow."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.rpc.v1 import inference_pb2
from router.output import Delta


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The one terminal event: a completion or an error."""

    completion: inference_pb2.Completion | None = None
    error: PdserveError | None = None


class Signal:
    """An asyncio.Event for one waiter, at a third of its cost: it is set once per token."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        """Starts unset."""
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wakes the waiter, or lets the next wait return at once."""
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """Makes the next wait wait."""
        self._is_set = False

    async def wait(self) -> None:
        """Returns once it is set."""
        if self._is_set:
            return
        assert self._waiter is None, "a signal has one waiter"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class ClientBuffer:
    """Between the reader of worker streams, who never waits, and one client's handler."""

    def __init__(self, max_bytes: int) -> None:
        """Starts empty."""
        self._max_bytes = max_bytes
        self._pending = Delta()
        self._pending_bytes = 0
        self._has_news = Signal()
        self._on_cut: Callable[[], object] | None = None
        self.ending: Ending | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes not yet taken by the handler."""
        return self._pending_bytes

    def push(self, delta: Delta) -> bool:
        """Adds output; False when the client is too far behind and must be cut."""
        if self.ending is not None or delta.is_empty:
            return True
        self._pending_bytes += delta.num_bytes()
        if self._pending_bytes > self._max_bytes:
            return False
        if self._pending.is_empty:
            self._pending = delta
        else:
            self._pending.extend(delta)
        self._has_news.set()
        return True

    def end(self, ending: Ending) -> bool:
        """Sets the terminal event; False when there is one already."""
        if self.ending is not None:
            return False
        self.ending = ending
        self._has_news.set()
        return True

    def cut(self, error: PdserveError) -> bool:
        """Ends with an error, drops what waits, and interrupts a handler stuck in a write."""
        if not self.end(Ending(error=error)):
            return False
        self._pending = Delta()
        self._pending_bytes = 0
        if self._on_cut is not None:
            self._on_cut()
        return True

    def interrupt_with(self, on_cut: Callable[[], object]) -> None:
        """Names what unblocks the handler."""
        self._on_cut = on_cut

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yields output as it comes, merged since the last time; stops at the ending."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if not self._pending.is_empty:
                delta, self._pending, self._pending_bytes = self._pending, Delta(), 0
                yield delta
            # Not before the pending output was taken; more may have come during the yield.
            if self.ending is not None and self._pending.is_empty:
                return
            if not self._pending.is_empty:
                self._has_news.set()
