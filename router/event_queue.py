"""Cache events of many workers on their way to the index, which takes them in batches. Pure."""

from dataclasses import dataclass, field

from pdserve.request import WorkerId
from router.granule_table import Keys
from router.holder_sets import Bits
from router.prefix_index import PrefixIndex

MAX_BATCH = 1 << 13
"""Keys that the index takes at once, at most: under 10 ms of the event loop."""


@dataclass(slots=True)
class EventQueue:
    """Keeps the order of each worker's events; that of different workers does not matter."""

    index: PrefixIndex
    num_waiting: int = 0
    """Keys."""
    _events: list[tuple[WorkerId, Keys, Bits]] = field(default_factory=list)

    def put(self, worker_id: WorkerId, keys: Keys, is_removed: Bits) -> None:
        """Adds a worker's events, cut into what can be taken at once."""
        for start in range(0, len(keys), MAX_BATCH):
            part = slice(start, start + MAX_BATCH)
            self._events.append((worker_id, keys[part], is_removed[part]))
        self.num_waiting += len(keys)

    def begin_snapshot(self, worker_id: WorkerId) -> None:
        """Voids all that is known of a worker, what waits here included."""
        self.discard(worker_id)
        self.index.begin_snapshot(worker_id)

    def discard(self, worker_id: WorkerId) -> None:
        """Drops what waits of a worker."""
        self._events = [event for event in self._events if event[0] != worker_id]
        self.num_waiting = sum(len(event[1]) for event in self._events)

    def flush(self) -> None:
        """Hands one batch, the oldest, to the index."""
        size, count = 0, 0
        for event in self._events:
            if size + len(event[1]) > MAX_BATCH:
                break
            size += len(event[1])
            count += 1
        batch, self._events = self._events[:count], self._events[count:]
        self.num_waiting -= size
        if batch:
            worker_ids, keys, removed = zip(*batch, strict=True)
            self.index.apply(worker_ids, keys, removed)
