"""Obeys rank 0 on another rank of its replica: steps, frames to ship, frames to unload."""

from collections.abc import Callable

from kv_transfer.codec import endpoint_to_wire
from kv_transfer.events import FrameLanded, FrameSent, FrameUnloaded, LinkDown
from kv_transfer.follower_codec import (
    event_to_wire,
    landed_from_wire,
    peer_from_wire,
    ship_from_wire,
    unload_from_wire,
)
from kv_transfer.shipping import RankShipper, RankUnloader
from pdserve.request import ReservationId
from pdserve.rpc.v1 import handoff_pb2, rank_pb2


class FollowerDesk:
    """Takes orders and the events of this rank's links, one after another. Engine thread only.

    A rank of a prefill worker has a shipper, one of a decode worker an unloader.
    """

    def __init__(
        self,
        *,
        rank: int,
        compute: Callable[[rank_pb2.StepWork], None],
        tell: Callable[[rank_pb2.FromFollower], None],
        shipper: RankShipper | None = None,
        unloader: RankUnloader | None = None,
    ) -> None:
        """`tell` sends to rank 0."""
        self._rank = rank
        self._compute = compute
        self._tell = tell
        self._shipper = shipper
        self._unloader = unloader

    @property
    def link(self) -> handoff_pb2.LinkEndpoint | None:
        """Where this rank listens for links; None on prefill."""
        if self._unloader is None:
            return None
        (endpoint,) = self._unloader.endpoints()
        return endpoint_to_wire(endpoint)

    def handle(self, event: object) -> None:
        """Takes an order of rank 0, or an event of a link."""
        match event:
            case FrameSent() | FrameLanded() | LinkDown():
                self._tell(event_to_wire(event))
            case rank_pb2.ToFollower():
                self._obey(event)
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def close(self) -> None:
        """Ends all links."""
        if self._shipper is not None:
            self._shipper.close()
        if self._unloader is not None:
            self._unloader.close()

    def _obey(self, order: rank_pb2.ToFollower) -> None:
        name = order.WhichOneof("message")
        if name == "step":
            self._compute(order.step)
        elif self._shipper is not None:
            self._obey_shipping(order, self._shipper)
        elif self._unloader is not None:
            self._obey_unloading(order, self._unloader)

    def _obey_shipping(self, order: rank_pb2.ToFollower, shipper: RankShipper) -> None:
        match order.WhichOneof("message"):
            case "open_link":
                shipper.open(self._rank, peer_from_wire(order.open_link.peer))
            case "ship":
                shipper.ship(ship_from_wire(order.ship, self._rank))
            case "cancel_frames":
                shipper.cancel(ReservationId(order.cancel_frames.reservation_id))
            case other:
                raise AssertionError(f"a prefill rank was told to {other}")

    def _obey_unloading(self, order: rank_pb2.ToFollower, unloader: RankUnloader) -> None:
        match order.WhichOneof("message"):
            case "unload":
                unload = unload_from_wire(order.unload)
                unloader.unload(unload)
                done = FrameUnloaded(
                    reservation_id=unload.landed.reservation_id,
                    frame_index=unload.landed.frame_index,
                )
                self._tell(event_to_wire(done))
            case "reject":
                unloader.reject(landed_from_wire(order.reject))
            case other:
                raise AssertionError(f"a decode rank was told to {other}")
