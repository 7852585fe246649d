from dataclasses import replace

import pytest
import torch

from kv_transfer.codec import endpoint_to_wire
from kv_transfer.events import FrameLanded, FrameSent, FrameUnloaded, LinkDown, LinkEnds, LinkId
from kv_transfer.follower_codec import (
    event_from_wire,
    event_to_wire,
    ship_from_wire,
    ship_to_wire,
    unload_from_wire,
    unload_to_wire,
)
from kv_transfer.follower_desk import FollowerDesk
from kv_transfer.memory_links import MemoryHub, MemoryReceiver, MemorySender
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.ranked_shipping import RankedShipper, RankedUnloader
from kv_transfer.shipping import RankShipper, RankUnloader, ShipFrame, UnloadFrame
from kv_transfer.transport import LinkPeer, OutgoingFrame
from pdserve.cache.kv_region import KvRegion
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.request import BlockId, Incarnation, ReservationId, WorkerId
from pdserve.rpc.v1 import rank_pb2
from tests.support.host_device import HostDevice, HostMark, Network, Switches
from tests.support.kv import fill

GEOMETRY = KvGeometry(
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    block_size=16,
    dtype="float32",
    model_revision="r",
    tensor_parallel=2,
)
P, D = Incarnation(1), Incarnation(2)
ENDS = LinkEnds(D, 1, 1)
"""Of decode rank 1 and prefill rank 1, seen from prefill."""
PEER = LinkPeer(
    worker_id=WorkerId("d"),
    incarnation=D,
    endpoint=LinkEndpoint(host="h", port=7, token=b"t"),
    rank=1,
)
REGION = KvRegion(
    block_ids=(BlockId(2), BlockId(0)),
    offset=3,
    num_tokens=20,
    layers=range(2),
    heads=range(1, 2),
    dtype="bfloat16",
)
LANDED = FrameLanded(
    link=LinkId(P, 4, 1, 1),
    reservation_id=ReservationId(b"r"),
    frame_index=5,
    num_bytes=99,
    slot=3,
    is_intact=False,
)


def order(index: int, reservation: bytes = b"r", rank: int = 1) -> ShipFrame:
    return ShipFrame(
        prefill_rank=rank,
        peer=PEER,
        reservation_id=ReservationId(reservation),
        frame_index=index,
        region=REGION,
    )


def sent(index: int) -> FrameSent:
    return FrameSent(link=LinkId(D, 1, 1, 1), reservation_id=ReservationId(b"r"), frame_index=index)


class Ranks:
    """A `RankedShipper` of three ranks and what it sends to others."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        links = MemorySender(
            hub=MemoryHub(), worker_id=WorkerId("p"), incarnation=P, ring_slots=2, post=print
        )
        local = RankShipper(KvTensors(GEOMETRY, 4), links)
        self.shipper = RankedShipper(local, self._send, 3, 2)

    def _send(self, rank: int, message: rank_pb2.ToFollower) -> None:
        self.sent.append((rank, str(message.WhichOneof("message"))))


def test_frames_of_other_ranks_are_ordered_there_until_enough_are_under_way() -> None:
    ranks = Ranks()
    for index in range(2):
        assert ranks.shipper.has_room(ENDS)
        ranks.shipper.ship(order(index))
    assert ranks.sent == [(1, "ship"), (1, "ship")]
    assert not ranks.shipper.has_room(ENDS)
    assert ranks.shipper.has_room(replace(ENDS, own_rank=2))
    assert ranks.shipper.has_room(replace(ENDS, own_rank=0))
    ranks.shipper.take(sent(0))
    assert ranks.shipper.has_room(ENDS)


def test_a_dead_link_of_another_rank_has_room_again() -> None:
    ranks = Ranks()
    for index in range(2):
        ranks.shipper.ship(order(index))
    down = LinkDown(link=LinkId(D, 1, 1, 1), worker_id=WorkerId("d"), detail="x")
    ranks.shipper.take(down)
    assert ranks.shipper.has_room(ENDS)


def test_a_cancelled_reservation_takes_no_room_and_all_ranks_drop_its_frames() -> None:
    ranks = Ranks()
    ranks.shipper.ship(order(0, b"a"))
    ranks.shipper.ship(order(0, b"b"))
    ranks.shipper.cancel(ReservationId(b"a"))
    assert ranks.sent[2:] == [(1, "cancel_frames"), (2, "cancel_frames")]
    assert ranks.shipper.has_room(ENDS)


def test_links_of_other_ranks_are_opened_there() -> None:
    ranks = Ranks()
    ranks.shipper.open(2, PEER)
    ranks.shipper.open(0, PEER)
    assert ranks.sent == [(2, "open_link")]


def test_what_landed_on_another_rank_is_unloaded_there() -> None:
    told: list[tuple[int, rank_pb2.ToFollower]] = []
    receiver = MemoryReceiver(
        hub=MemoryHub(), incarnation=D, ring_slots=1, slot_bytes=1, post=print
    )
    local = RankUnloader(KvTensors(GEOMETRY, 4), receiver)
    unloader = RankedUnloader(
        local, lambda rank, message: told.append((rank, message)), [PEER.endpoint]
    )
    assert unloader.endpoints() == (receiver.endpoint(), PEER.endpoint)
    assert not unloader.unload(UnloadFrame(landed=LANDED, region=REGION))
    unloader.reject(LANDED)
    assert [(rank, message.WhichOneof("message")) for rank, message in told] == [
        (1, "unload"),
        (1, "reject"),
    ]


@pytest.mark.parametrize(
    "event",
    [
        sent(3),
        LANDED,
        FrameUnloaded(reservation_id=ReservationId(b"r"), frame_index=2),
        LinkDown(
            link=LinkId(D, 1, 2, 3),
            worker_id=WorkerId("d"),
            detail="why",
            lost=frozenset({ReservationId(b"a"), ReservationId(b"b")}),
        ),
    ],
)
def test_events_come_back_as_they_were(event: FrameSent | FrameLanded | LinkDown) -> None:
    assert event_from_wire(event_to_wire(event)) == event


def test_orders_come_back_as_they_were() -> None:
    assert ship_from_wire(ship_to_wire(order(4)), 1) == order(4)
    early = replace(order(4), after_step=0)
    assert ship_from_wire(ship_to_wire(early), 1) == early
    unload = UnloadFrame(landed=LANDED, region=REGION)
    assert unload_from_wire(unload_to_wire(unload)) == unload


def test_two_followers_move_a_frame_as_they_are_told() -> None:
    hub, told = MemoryHub(), list[rank_pb2.FromFollower]()
    events: list[object] = []
    part = GEOMETRY.parts[1]
    source, target = fill(KvTensors(GEOMETRY, 4, part)), KvTensors(GEOMETRY, 4, part)
    sender = MemorySender(
        hub=hub, worker_id=WorkerId("p"), incarnation=P, ring_slots=2, post=events.append, rank=1
    )
    receiver = MemoryReceiver(
        hub=hub, incarnation=D, ring_slots=2, slot_bytes=4096, post=events.append, rank=1
    )
    steps: list[rank_pb2.StepWork] = []
    prefill = FollowerDesk(
        rank=1, compute=steps.append, tell=told.append, shipper=RankShipper(source, sender)
    )
    decode = FollowerDesk(
        rank=1, compute=steps.append, tell=told.append, unloader=RankUnloader(target, receiver)
    )
    assert decode.link == endpoint_to_wire(receiver.endpoint())
    assert prefill.link is None
    region = replace(REGION, dtype="float32")
    ship = replace(order(5), region=region, peer=replace(PEER, endpoint=receiver.endpoint()))
    prefill.handle(rank_pb2.ToFollower(ship=ship_to_wire(ship)))
    for event in events:
        (decode if isinstance(event, FrameLanded) else prefill).handle(event)
    kinds = [message.WhichOneof("message") for message in told]
    assert sorted(map(str, kinds)) == ["landed", "sent"]
    landed = event_from_wire(told[kinds.index("landed")])
    assert isinstance(landed, FrameLanded)
    unload = UnloadFrame(landed=landed, region=region)
    decode.handle(rank_pb2.ToFollower(unload=unload_to_wire(unload)))
    assert told[-1].WhichOneof("message") == "unloaded"
    assert torch.equal(target.pack(region), source.pack(region))
    prefill.handle(rank_pb2.ToFollower(step=rank_pb2.StepWork()))
    assert len(steps) == 1


class OwnMarks:
    """A rank's marks in its own steps; it has forgotten those before the fourth."""

    newest = 5

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def find(self, step: int, end_layer: int) -> HostMark | None:
        self.asked.append((step, end_layer))
        return HostMark(Switches()) if step >= 4 else None


class KeptFrames:
    def __init__(self) -> None:
        self.frames: list[OutgoingFrame] = []

    def push(self, peer: LinkPeer, frame: OutgoingFrame) -> None:
        self.frames.append(frame)


def test_each_rank_lets_its_frames_wait_for_its_own_part_of_a_step() -> None:
    part = GEOMETRY.parts[1]
    kv, links, marks = KvTensors(GEOMETRY, 4, part), KeptFrames(), OwnMarks()
    device = HostDevice(kv, Network(), uuid="gpu 1")
    shipper = RankShipper(kv, links, device, marks)  # type: ignore[arg-type]  # it only pushes
    desk = FollowerDesk(
        rank=1, compute=lambda work: None, tell=lambda message: None, shipper=shipper
    )
    ship = replace(order(0), region=replace(REGION, layers=range(1), dtype="float32"))
    for index, step in enumerate((5, 3, None)):
        one = replace(ship, frame_index=index, after_step=step)
        desk.handle(rank_pb2.ToFollower(ship=ship_to_wire(one)))
    assert marks.asked == [(5, 1), (3, 1)]
    assert [frame.after is not None for frame in links.frames] == [True, False, False]
