"""The traffic of frames without a GPU: streams and events are stand-ins, kernels interpreted."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pdserve.cache.kv_region import KvRegion, make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.cuda.kv_traffic import KvTraffic, read_host_id
from pdserve.request import BlockId
from tests.support.host_device import HostSum
from tests.support.kv import fill

GEOMETRY = KvGeometry(
    num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", model_revision="r"
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted only without a GPU"
)


class StandInStream:
    waited: list["StandInEvent"]

    def __init__(self, device: torch.device, priority: int) -> None:
        self.waited = []
        self.cuda_stream = 0

    def wait_event(self, event: "StandInEvent") -> None:
        self.waited.append(event)


class StandInEvent:
    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> StandInStream:
    """The engine's stream."""
    stream = StandInStream(torch.device("cpu"), 0)
    properties = SimpleNamespace(multi_processor_count=3, uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return stream


def region_of(tokens: range, dtype: str = "float32") -> KvRegion:
    table = tuple(BlockId(block) for block in (5, 1, 7, 0))
    return make_region(
        table=table, block_size=4, tokens=tokens, layers=range(2), heads=range(2), dtype=dtype
    )


def test_frames_are_gathered_with_their_own_checksums_and_scattered(steps: StandInStream) -> None:
    source, target = fill(KvTensors(GEOMETRY, 8), 1), KvTensors(GEOMETRY, 8)
    out, into = KvTraffic(source, nccl_max_ctas=1), KvTraffic(target, nccl_max_ctas=1)
    lane, checks = out.make_lane(), into.make_lane()
    for tokens in (range(16), range(3, 9), range(10, 11)):
        region = region_of(tokens)
        frame = torch.zeros(source.frame_bytes(region), dtype=torch.uint8)
        gathered, checked = lane.gather(region, frame, has_sum=True), checks.add_up(frame)
        assert gathered is not None
        assert gathered.value() == checked.value() == HostSum(frame).value()
        assert torch.equal(frame, source.pack(region))
        mark = into.scatter(region, frame)
        assert steps.waited[-1] is mark.event
        assert torch.equal(target.pack(region), frame)
        host = torch.zeros_like(frame)
        lane.gather_to_host(region, host)
        assert torch.equal(host, frame)


def test_warming_up_changes_no_value(steps: StandInStream) -> None:
    kv, expected = fill(KvTensors(GEOMETRY, 8), 1), fill(KvTensors(GEOMETRY, 8), 1)
    KvTraffic(kv, nccl_max_ctas=1)
    for layer in range(2):
        for one, other in zip(kv.layer(layer), expected.layer(layer), strict=True):
            assert torch.equal(one, other)


def test_one_mark_serves_until_something_is_launched_behind_it(steps: StandInStream) -> None:
    kv = fill(KvTensors(GEOMETRY, 8), 1)
    traffic = KvTraffic(kv, nccl_max_ctas=1)
    lane, region = traffic.make_lane(), region_of(range(4))
    frame = torch.zeros(kv.frame_bytes(region), dtype=torch.uint8)
    lane.gather(region, frame, has_sum=False)
    first = lane.mark()
    assert lane.mark() is first
    lane.add_up(frame)
    second = lane.mark()
    assert second is not first
    with lane.entered():
        frame ^= 1
    assert lane.mark() is not second


def test_a_frame_that_does_not_fit_touches_no_block(steps: StandInStream) -> None:
    kv = fill(KvTensors(GEOMETRY, 8), 1)
    traffic, region = KvTraffic(kv, nccl_max_ctas=1), region_of(range(8))
    before = kv.pack(region)
    with pytest.raises(ValueError, match="payload must be"):
        traffic.scatter(region, torch.zeros(12, dtype=torch.uint8))
    beyond = make_region(
        table=(BlockId(8),),
        block_size=4,
        tokens=range(4),
        layers=range(2),
        heads=range(2),
        dtype="float32",
    )
    with pytest.raises(ValueError, match="block id"):
        traffic.scatter(beyond, torch.zeros(kv.frame_bytes(beyond), dtype=torch.uint8))
    assert torch.equal(kv.pack(region), before)


def test_processes_of_one_host_name_it_alike() -> None:
    assert read_host_id() == read_host_id()
    assert len(read_host_id()) == 32
