"""Whose turn it is among those that wait: strict priorities that age, tenants in fair shares.

    priority 0   tenant a: [9000] [200]     each round a tenant may spend a quantum of uncached
                 tenant b: [300] [300]      tokens more; what it does not spend it keeps (deficit
    priority 1   tenant c: [5000]           round robin, Shreedhar and Varghese, 1995)

Who waits `aging_s` counts as one priority higher, so that no priority starves another.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

QUANTUM_TOKENS = 4096
AGING_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What decides when a request's turn comes."""

    tenant: str
    priority: int
    cost: int
    """Uncached tokens."""


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Item]):
    item: Item
    cost: int
    since_s: float


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    waiting: deque[_Waiting[Item]]
    deficit: int = 0


class _Lane(Generic[Item]):
    """The tenants of one priority; the first of the ring is next."""

    def __init__(self) -> None:
        self.ring: OrderedDict[str, _Tenant[Item]] = OrderedDict()

    def push(self, tenant: str, waiting: _Waiting[Item]) -> None:
        queue = self.ring.get(tenant)
        if queue is None:
            queue = self.ring[tenant] = _Tenant(deque())
        queue.waiting.append(waiting)

    def oldest_s(self) -> float:
        return min(queue.waiting[0].since_s for queue in self.ring.values())

    def pop(self) -> _Waiting[Item]:
        self._skip_rounds()
        while True:
            tenant, queue = next(iter(self.ring.items()))
            head = queue.waiting[0]
            if queue.deficit >= head.cost:
                queue.deficit -= head.cost
                queue.waiting.popleft()
                if not queue.waiting:
                    # An idle tenant saves nothing for later.
                    del self.ring[tenant]
                return head
            queue.deficit += QUANTUM_TOKENS
            self.ring.move_to_end(tenant)

    def _skip_rounds(self) -> None:
        """Gives all tenants at once the rounds in which nobody could pay for its head."""
        rounds = min(
            max(queue.waiting[0].cost - queue.deficit, 0) // QUANTUM_TOKENS
            for queue in self.ring.values()
        )
        if rounds > 1:
            for queue in self.ring.values():
                queue.deficit += (rounds - 1) * QUANTUM_TOKENS

    def remove(self, tenant: str, item: Item) -> bool:
        queue = self.ring.get(tenant)
        if queue is None:
            return False
        for waiting in queue.waiting:
            if waiting.item == item:
                queue.waiting.remove(waiting)
                if not queue.waiting:
                    del self.ring[tenant]
                return True
        return False


class FairQueue(Generic[Item]):
    """Orders what waits. One thread; costs are uncached tokens."""

    def __init__(self, aging_s: float = AGING_S) -> None:
        """Starts empty."""
        self._aging_s = aging_s
        self._lanes: dict[int, _Lane[Item]] = {}
        self._tokens: dict[int, int] = {}
        """Of all that wait, by priority."""
        self._places: dict[Item, tuple[int, str, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def tokens_before(self, priority: int) -> int:
        """Returns the cost of all that wait with this priority or a higher one."""
        return sum(tokens for level, tokens in self._tokens.items() if level <= priority)

    def push(self, item: Item, *, tenant: str, priority: int, cost: int, now_s: float) -> None:
        """Adds an item behind its tenant's others.

        Args:
            item: hashable, not waiting yet.
            tenant: whose share it takes.
            priority: smaller is served first.
            cost: uncached tokens.
            now_s: the time.
        """
        assert item not in self._places
        lane = self._lanes.setdefault(priority, _Lane())
        lane.push(tenant, _Waiting(item, max(cost, 1), now_s))
        self._places[item] = (priority, tenant, cost)
        self._tokens[priority] = self._tokens.get(priority, 0) + cost

    def pop(self, now_s: float) -> Item:
        """Takes out whose turn it is; there must be one."""

        def standing(priority: int) -> tuple[float, float]:
            oldest_s = self._lanes[priority].oldest_s()
            return priority - (now_s - oldest_s) // self._aging_s, oldest_s

        priority = min(self._lanes, key=standing)
        item = self._lanes[priority].pop().item
        self._forget(item)
        return item

    def remove(self, item: Item) -> None:
        """Takes out one that waits no more; one that is not there is no error."""
        place = self._places.get(item)
        if place is None:
            return
        priority, tenant, _ = place
        self._lanes[priority].remove(tenant, item)
        self._forget(item)

    def _forget(self, item: Item) -> None:
        priority, _, cost = self._places.pop(item)
        self._tokens[priority] -= cost
        if not self._lanes[priority].ring:
            del self._lanes[priority], self._tokens[priority]
