"""Where requests wait for their turn: in the brain, as long as workers have enough to do.

What was sent to a worker cannot be overtaken, so no more is sent ahead than keeps workers busy: the
rest waits here, where priorities and fairness between tenants count. When nobody waits and there
is room, a request goes on at once.
"""

import asyncio
from dataclasses import dataclass, field

from pdserve.request import Role
from pdserve.timeline import Clock
from router.fair_queue import FairQueue, Turn
from router.load_book import LoadBook
from router.room import LOOK_AGAIN_S, has_room


@dataclass(slots=True, eq=False)
class _Ticket:
    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingRoom:
    """Grants turns. One event loop."""

    def __init__(self, book: LoadBook, clock: Clock) -> None:
        """Listens to the book from now on."""
        self._book = book
        self._clock = clock
        self._queue: FairQueue[_Ticket] = FairQueue()
        self._role = Role.PREFILL
        """Of the workers that compute prompts."""
        self._timer: asyncio.TimerHandle | None = None
        book.on_room = self.call

    def __len__(self) -> int:
        return len(self._queue)

    def tokens_before(self, priority: int) -> int:
        """Returns the uncached tokens of those that are probably served before a new request."""
        return self._queue.tokens_before(priority)

    async def wait_for_turn(self, turn: Turn, *, has_prefill_pool: bool) -> None:
        """Returns when a request may be placed; a cancelled wait gives its turn away."""
        role = Role.PREFILL if has_prefill_pool else Role.DECODE
        if not self._queue and self._has_room(role):
            return
        self._role = role
        ticket = _Ticket()
        self._queue.push(
            ticket,
            tenant=turn.tenant,
            priority=turn.priority,
            cost=turn.cost,
            now_s=self._clock.now(),
        )
        self._look_again()
        try:
            await ticket.granted
        finally:
            self._queue.remove(ticket)

    def call(self) -> None:
        """Calls the next one in, if there is room, and then looks again."""
        while self._queue and self._has_room(self._role):
            ticket = self._queue.pop(self._clock.now())
            if ticket.granted.done():
                # Cancelled a moment ago: its task has not had its turn to leave the queue.
                continue
            ticket.granted.set_result(None)
            # Behind the turn of the task that waited: by then its work has been counted.
            asyncio.get_running_loop().call_soon(self.call)
            return

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.call()
        if self._queue:
            self._look_again()

    def _has_room(self, role: Role) -> bool:
        return has_room(self._book.fleet, role, self._clock.now())
