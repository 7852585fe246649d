"""When a router has heard from the present life of a replica."""

import pytest

from launcher.pool import Member
from launcher.pool_figures import to_figures
from pdserve.registry.base import WorkerRecord
from pdserve.request import Incarnation, Role
from pdserve.rpc.v1 import inference_pb2
from tests.support.records import make_record

HEARD = make_record("prefill-1", incarnation=Incarnation(8))


@pytest.mark.parametrize(
    ("record", "incarnation", "state", "is_heard"),
    [
        (HEARD, 8, "ready", True),
        (HEARD, 7, "ready", False),
        (HEARD, 7, "flipping", False),
        (HEARD, 8, "silent", False),
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
