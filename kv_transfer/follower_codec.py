"""Turns what the ranks of one replica tell each other of links into protobuf and back."""

from kv_transfer.codec import endpoint_from_wire, endpoint_to_wire
from kv_transfer.events import FrameLanded, FrameSent, FrameUnloaded, LinkDown, LinkId
from kv_transfer.shipping import ShipFrame, UnloadFrame
from kv_transfer.transport import LinkPeer
from pdserve.cache.kv_region import KvRegion
from pdserve.request import BlockId, Incarnation, ReservationId, WorkerId
from pdserve.rpc.v1 import rank_pb2

FollowerEvent = FrameSent | FrameLanded | FrameUnloaded | LinkDown


def peer_to_wire(peer: LinkPeer) -> rank_pb2.LinkPeer:
    """Encodes a rank of a peer."""
    return rank_pb2.LinkPeer(
        worker_id=peer.worker_id,
        incarnation=peer.incarnation,
        endpoint=endpoint_to_wire(peer.endpoint),
        rank=peer.rank,
    )


def peer_from_wire(wire: rank_pb2.LinkPeer) -> LinkPeer:
    """Decodes a rank of a peer."""
    return LinkPeer(
        worker_id=WorkerId(wire.worker_id),
        incarnation=Incarnation(wire.incarnation),
        endpoint=endpoint_from_wire(wire.endpoint),
        rank=wire.rank,
    )


def ship_to_wire(order: ShipFrame) -> rank_pb2.ShipFrame:
    """Encodes an order to ship."""
    return rank_pb2.ShipFrame(
        peer=peer_to_wire(order.peer),
        reservation_id=order.reservation_id,
        frame_index=order.frame_index,
        region=_region_to_wire(order.region),
        after_step=order.after_step,
    )


def ship_from_wire(wire: rank_pb2.ShipFrame, rank: int) -> ShipFrame:
    """Decodes an order to ship, on the rank that gets it."""
    return ShipFrame(
        prefill_rank=rank,
        peer=peer_from_wire(wire.peer),
        reservation_id=ReservationId(wire.reservation_id),
        frame_index=wire.frame_index,
        region=_region_from_wire(wire.region),
        after_step=wire.after_step if wire.HasField("after_step") else None,
    )


def unload_to_wire(order: UnloadFrame) -> rank_pb2.UnloadFrame:
    """Encodes an order to unload."""
    return rank_pb2.UnloadFrame(
        landed=landed_to_wire(order.landed), region=_region_to_wire(order.region)
    )


def unload_from_wire(wire: rank_pb2.UnloadFrame) -> UnloadFrame:
    """Decodes an order to unload."""
    return UnloadFrame(landed=landed_from_wire(wire.landed), region=_region_from_wire(wire.region))


def landed_to_wire(landed: FrameLanded) -> rank_pb2.FrameLanded:
    """Encodes a landed frame."""
    return rank_pb2.FrameLanded(
        link=_link_to_wire(landed.link),
        reservation_id=landed.reservation_id,
        frame_index=landed.frame_index,
        num_bytes=landed.num_bytes,
        slot=landed.slot,
        is_intact=landed.is_intact,
    )


def landed_from_wire(wire: rank_pb2.FrameLanded) -> FrameLanded:
    """Decodes a landed frame."""
    return FrameLanded(
        link=_link_from_wire(wire.link),
        reservation_id=ReservationId(wire.reservation_id),
        frame_index=wire.frame_index,
        num_bytes=wire.num_bytes,
        slot=wire.slot,
        is_intact=wire.is_intact,
    )


def event_to_wire(event: FollowerEvent) -> rank_pb2.FromFollower:
    """Encodes what a rank's links, or its memory, have to tell."""
    match event:
        case FrameSent():
            sent = rank_pb2.FrameSent(
                link=_link_to_wire(event.link),
                reservation_id=event.reservation_id,
                frame_index=event.frame_index,
            )
            return rank_pb2.FromFollower(sent=sent)
        case FrameLanded():
            return rank_pb2.FromFollower(landed=landed_to_wire(event))
        case FrameUnloaded():
            unloaded = rank_pb2.FrameUnloaded(
                reservation_id=event.reservation_id, frame_index=event.frame_index
            )
            return rank_pb2.FromFollower(unloaded=unloaded)
        case LinkDown():
            down = rank_pb2.LinkDown(
                link=_link_to_wire(event.link),
                worker_id=event.worker_id,
                detail=event.detail,
                lost=sorted(event.lost),
            )
            return rank_pb2.FromFollower(down=down)


def event_from_wire(wire: rank_pb2.FromFollower) -> FollowerEvent:
    """Decodes what another rank has to tell."""
    match wire.WhichOneof("message"):
        case "sent":
            return FrameSent(
                link=_link_from_wire(wire.sent.link),
                reservation_id=ReservationId(wire.sent.reservation_id),
                frame_index=wire.sent.frame_index,
            )
        case "landed":
            return landed_from_wire(wire.landed)
        case "unloaded":
            return FrameUnloaded(
                reservation_id=ReservationId(wire.unloaded.reservation_id),
                frame_index=wire.unloaded.frame_index,
            )
        case "down":
            return LinkDown(
                link=_link_from_wire(wire.down.link),
                worker_id=WorkerId(wire.down.worker_id),
                detail=wire.down.detail,
                lost=frozenset(ReservationId(one) for one in wire.down.lost),
            )
        case other:
            raise AssertionError(f"a rank told rank 0 {other}")


def _region_to_wire(region: KvRegion) -> rank_pb2.KvRegion:
    return rank_pb2.KvRegion(
        block_ids=region.block_ids,
        offset=region.offset,
        num_tokens=region.num_tokens,
        layers=rank_pb2.Span(start=region.layers.start, stop=region.layers.stop),
        heads=rank_pb2.Span(start=region.heads.start, stop=region.heads.stop),
        dtype=region.dtype,
    )


def _region_from_wire(wire: rank_pb2.KvRegion) -> KvRegion:
    return KvRegion(
        block_ids=tuple(BlockId(block) for block in wire.block_ids),
        offset=wire.offset,
        num_tokens=wire.num_tokens,
        layers=range(wire.layers.start, wire.layers.stop),
        heads=range(wire.heads.start, wire.heads.stop),
        dtype=wire.dtype,
    )


def _link_to_wire(link: LinkId) -> rank_pb2.LinkId:
    return rank_pb2.LinkId(
        peer=link.peer, epoch=link.epoch, peer_rank=link.peer_rank, own_rank=link.own_rank
    )


def _link_from_wire(wire: rank_pb2.LinkId) -> LinkId:
    return LinkId(Incarnation(wire.peer), wire.epoch, wire.peer_rank, wire.own_rank)
