"""Where simulated requests wait for their turn: the fair queue of production, in virtual time.

See `router.waiting_room`, which does the same with asyncio.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.request import RequestId, Role
from router.fair_queue import FairQueue
from router.room import LOOK_AGAIN_S
from simulation.clock import EventQueue
from simulation.routing import Brain


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What decides when a request's turn comes."""

    request_id: RequestId
    priority: int
    tenant: str
    uncached_tokens: int


class Turns:
    """Grants turns as long as workers would soon be idle."""

    def __init__(self, brain: Brain, queue: EventQueue, grant: Callable[[RequestId], None]) -> None:
        """Listens to the brain from now on.

        Args:
            brain: knows what workers have to do.
            queue: virtual time.
            grant: places a request; called while nothing else is being placed.
        """
        self._brain = brain
        self._queue = queue
        self._grant = grant
        self._waiting: FairQueue[RequestId] = FairQueue()
        self._role = Role.PREFILL
        self._is_called = self._looks_again = False
        brain.on_room = self._on_room

    def tokens_before(self, priority: int) -> int:
        """Returns the uncached tokens of those that are probably served before a new request."""
        return self._waiting.tokens_before(priority)

    def wait(self, one: Waiting, role: Role) -> None:
        """Grants a turn now, or when there is room among workers of a pool."""
        if not len(self._waiting) and self._brain.has_room(role):
            self._grant(one.request_id)
            return
        self._role = role
        self._waiting.push(
            one.request_id,
            tenant=one.tenant,
            priority=one.priority,
            cost=one.uncached_tokens,
            now_s=self._queue.now(),
        )
        self._look_again()

    def _on_room(self) -> None:
        if len(self._waiting) and not self._is_called:
            self._is_called = True
            self._queue.after(0.0, self._call)

    def _call(self) -> None:
        self._is_called = False
        while len(self._waiting) and self._brain.has_room(self._role):
            self._grant(self._waiting.pop(self._queue.now()))

    def _look_again(self) -> None:
        """Workers that come make room as well, and do not say so here."""
        if not self._looks_again:
            self._looks_again = True
            self._queue.after(LOOK_AGAIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._looks_again = False
        self._call()
        if len(self._waiting):
            self._look_again()
