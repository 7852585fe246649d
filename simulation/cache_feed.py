"""What simulated workers tell of their caches, on its way to the router's index.

Changes come in batches, as the streams of production bring them (`router.cache_watch`); what can
go wrong with a stream has no place here.
"""

from collections.abc import Callable

import numpy as np

from pdserve.cache.cached_granules import CachedGranules
from pdserve.request import WorkerId
from router.event_queue import EventQueue as EventBatches
from router.prefix_index import PrefixIndex
from simulation.clock import EventQueue

FLUSH_S = 0.02
"""From a change in a cache until the router knows of it: a step's updates, then a batch."""


class CacheFeed:
    """Feeds the caches of all workers into one index."""

    def __init__(self, index: PrefixIndex, queue: EventQueue, flush_s: float = FLUSH_S) -> None:
        """Follows nobody."""
        self._flush_s = flush_s
        self._batches = EventBatches(index)
        self._queue = queue
        self._caches: dict[WorkerId, CachedGranules] = {}
        self._missed: set[WorkerId] = set()
        self._is_due = False
        self.has_work: Callable[[], bool] = _never
        """Says whether anything may change any more: else virtual time would have no end."""

    def follow(self, worker_id: WorkerId) -> CachedGranules:
        """Returns what a new worker is to tell its cache's changes."""
        cache = self._caches[worker_id] = CachedGranules()
        self._batches.begin_snapshot(worker_id)
        return cache

    def leave(self, worker_id: WorkerId) -> None:
        """Drops a worker, and what it told last."""
        self._caches.pop(worker_id, None)
        self._missed.discard(worker_id)
        self._batches.discard(worker_id)

    def miss(self, worker_id: WorkerId) -> None:
        """Hears nothing of a worker from now on; what it told before counts no more."""
        self._missed.add(worker_id)
        self._batches.begin_snapshot(worker_id)

    def look_anew(self, worker_id: WorkerId) -> None:
        """Asks a worker that was missed for all that it has, and hears it from then on."""
        self._missed.discard(worker_id)
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        cache.take_changes()
        self._batches.begin_snapshot(worker_id)
        keys = np.fromiter(cache.keys(), np.uint64, len(cache))
        self._batches.put(worker_id, keys, np.zeros(len(cache), np.bool_))
        self.wake()

    def wake(self) -> None:
        """Something may have changed."""
        if not self._is_due:
            self._is_due = True
            self._queue.after(self._flush_s, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        for worker_id, cache in self._caches.items():
            if cache.changes.keys:
                changes = cache.take_changes()
                if worker_id in self._missed:
                    continue
                keys = np.frombuffer(changes.keys, np.uint64)
                self._batches.put(worker_id, keys, np.frombuffer(changes.is_removed, np.bool_))
        while self._batches.num_waiting:
            self._batches.flush()
        if self.has_work():
            self.wake()


def _never() -> bool:
    return False
