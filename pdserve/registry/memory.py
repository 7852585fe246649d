"""Membership inside one process: the twin of the Redis registry, for tests and simulation."""

from pdserve.registry.base import RegistryUnavailable, StageRecord, WorkerRecord
from pdserve.request import Incarnation, WorkerId
from pdserve.timeline import Clock


class MemoryRegistry:
    """Keeps records in a dict under leases of the injected clock."""

    def __init__(self, clock: Clock) -> None:
        """Starts empty and available."""
        self._clock = clock
        self._entries: dict[WorkerId, tuple[WorkerRecord, float]] = {}
        self._stages: dict[tuple[WorkerId, int], tuple[StageRecord, float]] = {}
        self.is_available = True
        """False makes every call raise, as a dead store would."""

    async def register(self, record: WorkerRecord, lease_s: float) -> None:
        """Writes or renews a record; see `Registry`."""
        self._require_available()
        self._entries[record.worker_id] = (record, self._clock.now() + lease_s)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Removes a record of this very incarnation; see `Registry`."""
        self._require_available()
        entry = self._entries.get(worker_id)
        if entry is not None and entry[0].incarnation == incarnation:
            del self._entries[worker_id]

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """Returns the records whose lease holds; see `Registry`."""
        self._require_available()
        now = self._clock.now()
        self._entries = {key: entry for key, entry in self._entries.items() if entry[1] > now}
        return tuple(self._entries[key][0] for key in sorted(self._entries))

    async def register_stage(self, record: StageRecord, lease_s: float) -> None:
        """Writes or renews a stage's record; see `Registry`."""
        self._require_available()
        self._stages[record.worker_id, record.stage] = (record, self._clock.now() + lease_s)

    async def deregister_stage(self, record: StageRecord) -> None:
        """Removes a record of this very incarnation; see `Registry`."""
        self._require_available()
        entry = self._stages.get((record.worker_id, record.stage))
        if entry is not None and entry[0].incarnation == record.incarnation:
            del self._stages[record.worker_id, record.stage]

    async def list_stages(self, worker_id: WorkerId) -> tuple[StageRecord, ...]:
        """Returns a worker's stages whose lease holds; see `Registry`."""
        self._require_available()
        now = self._clock.now()
        self._stages = {key: entry for key, entry in self._stages.items() if entry[1] > now}
        keys = sorted(key for key in self._stages if key[0] == worker_id)
        return tuple(self._stages[key][0] for key in keys)

    def clear(self) -> None:
        """Forgets everything, as a restarted or flushed store would."""
        self._entries.clear()
        self._stages.clear()

    def _require_available(self) -> None:
        if not self.is_available:
            raise RegistryUnavailable("the registry was switched off")
