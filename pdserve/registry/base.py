"""Who is in the cluster: worker records under leases. A hint that may vanish."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pdserve.request import Incarnation, Role, WorkerId

WorkerState = Literal["ready", "draining"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """What a worker says of itself; renewed with every heartbeat."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    """64 random bits, new at every start."""
    address: str
    """host:port of the Worker (and, on decode, Handoff) service."""
    metrics_address: str
    state: WorkerState
    compatibility_digest: bytes
    """Of the KV geometry; prefill and decode pair only if equal."""
    geometry: str
    """The same as readable `field=value` pairs, to name the field that differs."""
    model: str
    max_model_len: int
    total_blocks: int
    block_size: int
    face_pid: int
    rank_pids: tuple[int, ...]
    worker_class: str = "unknown"
    """Device, model, data type and shape: workers of one class are alike to the predictor."""
    max_num_seqs: int = 256
    """Sequences in one step."""
    max_num_batched_tokens: int = 8192
    """Tokens in one step."""
    kv_bytes_per_token: int = 0
    """Over all layers and ranks; 0: not said, what a hand-off takes is left out then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """Where a pipeline stage of a worker waits for its face; renewed like a worker's."""

    worker_id: WorkerId
    stage: int
    incarnation: Incarnation
    """Of what holds the stage, new at every start of it."""
    address: str
    """host:port where the face connects."""


class Registry(Protocol):
    """Membership. Implementations: `memory` (tests, one process) and `redis`."""

    async def register(self, record: WorkerRecord, lease_s: float) -> None:
        """Writes or renews a record; it disappears `lease_s` after the last call.

        Raises:
            RegistryUnavailable: the store does not answer.
        """
        ...

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Removes a record, unless a newer incarnation took its place.

        Raises:
            RegistryUnavailable: the store does not answer.
        """
        ...

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """Returns all records whose lease holds, sorted by worker id.

        Raises:
            RegistryUnavailable: the store does not answer.
        """
        ...

    async def register_stage(self, record: StageRecord, lease_s: float) -> None:
        """Writes or renews a stage's record; it disappears `lease_s` after the last call.

        Raises:
            RegistryUnavailable: the store does not answer.
        """
        ...

    async def deregister_stage(self, record: StageRecord) -> None:
        """Removes a stage's record, unless a newer incarnation took its place.

        Raises:
            RegistryUnavailable: the store does not answer.
        """
        ...

    async def list_stages(self, worker_id: WorkerId) -> tuple[StageRecord, ...]:
        """Returns a worker's stages whose lease holds, in their order.

        Raises:
            RegistryUnavailable: the store does not answer.
        """
        ...


class RegistryUnavailable(Exception):
    """The registry's store cannot be reached; callers keep what they knew."""
