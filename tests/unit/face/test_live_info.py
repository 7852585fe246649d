from pathlib import Path

from pdserve.face.service import LiveInfo, new_worker_info
from pdserve.request import Incarnation
from pdserve.rpc.v1 import inference_pb2, rank_pb2, types_pb2


def heartbeat(num_running: int) -> rank_pb2.RankHeartbeat:
    step = types_pb2.DecodeStep(num_sequences=num_running, num_kv_tokens=5)
    samples = [types_pb2.StepSample(seconds=0.1, decode=step) for _ in range(8)]
    load = types_pb2.WorkerLoad(num_running=num_running, samples=samples)
    links = [inference_pb2.LinkInfo(peer_worker_id="p0", transport="gloo") for _ in range(4)]
    return rank_pb2.RankHeartbeat(load=load, links=links)


def test_what_is_said_is_the_identity_of_now_and_the_last_heartbeat() -> None:
    live = LiveInfo(new_worker_info("d0", "decode", Incarnation(7), 1))
    assert not live.describe().links
    live.heartbeat = heartbeat(1)
    live.heartbeat = heartbeat(2)
    live.identity.state = "draining"
    told = live.describe()
    assert (told.worker_id, told.state, told.load.num_running) == ("d0", "draining", 2)
    assert [link.peer_worker_id for link in told.links] == ["p0"] * 4


def test_a_day_of_heartbeats_takes_no_memory() -> None:
    live = LiveInfo(new_worker_info("d0", "decode", Incarnation(7), 1))

    def resident_kb() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4

    data = heartbeat(3).SerializeToString()

    def beat(count: int) -> None:
        for _ in range(count):
            live.heartbeat = rank_pb2.RankHeartbeat.FromString(data)
            live.describe()

    beat(2000)
    before_kb = resident_kb()
    beat(20_000)
    # A message that all were copied into grows by 18 MB.
    assert resident_kb() - before_kb < 3000
