"""When a router has heard from the present life of a replica."""

import pytest

from launcher.pool import Member
from launcher.pool_figures import to_figures
from pdserve.registry.base import WorkerRecord
from pdserve.request import Incarnation, Role, WorkerId
from pdserve.rpc.v1 import inference_pb2

RECORD = WorkerRecord(
    worker_id=WorkerId("prefill-1"),
    role=Role.DECODE,
    incarnation=Incarnation(8),
    address="127.0.0.1:1",
    metrics_address="127.0.0.1:2",
    state="ready",
    compatibility_digest=b"",
    geometry="",
    model="m",
    max_model_len=128,
    total_blocks=10,
    block_size=16,
    face_pid=1,
    rank_pids=(2,),
)


@pytest.mark.parametrize(
    ("record", "incarnation", "state", "is_heard"),
    [
        (RECORD, 8, "ready", True),
        (RECORD, 7, "ready", False),
        (RECORD, 7, "flipping", False),
        (RECORD, 8, "silent", False),
        (None, 7, "ready", False),
    ],
)
def test_replica_is_heard_once_the_router_knows_its_present_life(
    record: WorkerRecord | None, incarnation: int, state: str, is_heard: bool
) -> None:
    member = Member(
        worker_id="prefill-1",
        role=Role.DECODE,
        face_pid=1,
        num_restarts=0,
        is_draining=False,
        record=record,
    )
    info = inference_pb2.WorkerInfo(worker_id="prefill-1", incarnation=incarnation, state=state)
    assert to_figures(member, info).is_heard is is_heard
