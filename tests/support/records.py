"""What a worker says of itself, where a test cares for little of it."""

from pdserve.registry.base import WorkerRecord
from pdserve.request import Incarnation, Role, WorkerId


def make_record(
    worker_id: str = "decode-0", role: Role = Role.DECODE, **over: object
) -> WorkerRecord:
    fields: dict[str, object] = {
        "worker_id": WorkerId(worker_id),
        "role": role,
        "incarnation": Incarnation(7),
        "address": "127.0.0.1:1",
        "metrics_address": "127.0.0.1:2",
        "state": "ready",
        "compatibility_digest": b"same",
        "geometry": "block_size=16",
        "model": "tiny",
        "max_model_len": 2048,
        "total_blocks": 100,
        "block_size": 16,
        "face_pid": 11,
        "rank_pids": (12,),
    }
    return WorkerRecord(**fields | over)  # type: ignore[arg-type]
