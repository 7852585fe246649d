"""Says that something has changed, to all who wait for that."""

import asyncio


class Changes:
    """Counts changes, so that none is missed between a look and a wait. One event loop."""

    def __init__(self) -> None:
        """Has seen no change yet."""
        self.count = 0
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Wakes all who wait."""
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, since: int, timeout_s: float) -> None:
        """Returns as soon as `count` is not `since`, or after the time-out."""
        if self.count != since:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass  # whoever waits looks again
