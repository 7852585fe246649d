"""What this router has dispatched and not seen end, per worker, in KV blocks."""

from collections import Counter
from collections.abc import Collection

from pdserve.request import RequestId
from router.policy import WorkerKey


class LoadBook:
    """Counts load at dispatch, so that a burst spreads before any worker reports it."""

    def __init__(self) -> None:
        """Starts empty."""
        self._blocks: Counter[WorkerKey] = Counter()
        self._charges: dict[RequestId, dict[WorkerKey, int]] = {}
        self._picks: dict[WorkerKey, int] = {}
        self._num_picks = 0

    def charge(self, request_id: RequestId, worker: WorkerKey, blocks: int) -> None:
        """Adds a request to a worker; a second charge replaces the first."""
        charges = self._charges.setdefault(request_id, {})
        self._blocks[worker] += blocks - charges.get(worker, 0)
        charges[worker] = blocks
        self._num_picks += 1
        self._picks[worker] = self._num_picks

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Releases a request from all workers but these."""
        charges = self._charges.get(request_id, {})
        for worker in [key for key in charges if key not in workers]:
            self._blocks[worker] -= charges.pop(worker)
            if not self._blocks[worker]:
                del self._blocks[worker]
        if not charges:
            self._charges.pop(request_id, None)

    def forget(self, worker: WorkerKey) -> None:
        """Forgets when a dead worker was picked; its charges go with their requests."""
        self._picks.pop(worker, None)

    def blocks_of(self, worker: WorkerKey) -> int:
        """Returns the blocks charged to a worker."""
        return self._blocks[worker]

    def last_pick_of(self, worker: WorkerKey) -> int:
        """Returns a counter that is larger for a later pick; 0 for a worker never picked."""
        return self._picks.get(worker, 0)
