"""Carries out, on one rank, what the hand-off asks of its memory and links.

The rank that runs the scheduler decides and names regions; each rank packs, sends, and unloads its
own. Engine thread only: it alone reads and writes blocks.
"""

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEnds
from kv_transfer.expected_frames import ExpectedFrames
from kv_transfer.link_device import LinkDevice, Mark
from kv_transfer.plan import Frame
from kv_transfer.protocol import LinkEndpoint, SampledAhead
from kv_transfer.transport import FrameReceiver, FrameSender, LinkPeer, LinkStatus, OutgoingFrame
from pdserve.cache.kv_marks import KvMarks
from pdserve.cache.kv_region import KvRegion, make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.request import BlockId, Incarnation, ReservationId


@dataclass(frozen=True, kw_only=True, slots=True)
class ShipFrame:
    """Pack a region now and give the copy to a link."""

    prefill_rank: int
    peer: LinkPeer
    reservation_id: ReservationId
    frame_index: int
    region: KvRegion
    after_step: int | None = None
    """The step that computes it, which need not have ended; None: it is computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadFrame:
    """Copy a landed frame into a region and free its slot."""

    landed: FrameLanded
    region: KvRegion


class Shipper(Protocol):
    """The memories and links of all ranks of a prefill worker."""

    def has_room(self, ends: LinkEnds) -> bool:
        """Says whether one more frame may be shipped between two ranks now."""
        ...

    def open(self, prefill_rank: int, peer: LinkPeer) -> None:
        """Begins to make a link, if there is none, so that the first frame need not wait."""
        ...

    def ship(self, order: ShipFrame) -> None:
        """Ships a frame; answered by FrameSent or LinkDown."""
        ...

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Tells a decode worker first tokens over the link of both ranks 0, if that can be."""
        ...

    def take(self, event: FrameSent | LinkDown) -> None:
        """Takes note of what a link reported, before the hand-off does."""
        ...

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently."""
        ...

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        ...

    def close(self) -> None:
        """Ends all links."""
        ...


class Unloader(Protocol):
    """The memories and links of all ranks of a decode worker."""

    def endpoints(self) -> tuple[LinkEndpoint, ...]:
        """Returns where the ranks listen for links, in their order."""
        ...

    def expect(self, expected: ExpectedFrames) -> None:
        """Lets frames of rank 0 be written as they land, where links can."""
        ...

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Ends that, before the blocks are given away."""
        ...

    def unload(self, order: UnloadFrame) -> bool:
        """Unloads a frame; False: it goes on elsewhere, and a FrameUnloaded tells of its end."""
        ...

    def reject(self, landed: FrameLanded) -> None:
        """Frees the slot of a frame that must touch no block."""
        ...

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        ...

    def close(self) -> None:
        """Ends all links and stops listening."""
        ...


class RankShipper:
    """The `Shipper` of one rank.

    On a GPU nothing is packed here: links read the blocks, which therefore stay as they are until
    the frame is sent, or cancelled.
    """

    def __init__(
        self,
        kv: KvTensors,
        links: FrameSender,
        device: LinkDevice | None = None,
        marks: KvMarks | None = None,
    ) -> None:
        """Keeps them.

        Args:
            kv: the rank's blocks.
            links: to decode ranks.
            device: of the blocks; None is a CPU.
            marks: in the rank's steps; None: frames are ordered only when their step has ended.
        """
        self._kv = kv
        self._links = links
        self._device = device
        self._marks = marks

    def has_room(self, ends: LinkEnds) -> bool:
        """Says whether one more frame may be packed for a rank of a peer now."""
        return self._links.has_room(ends.peer, ends.peer_rank)

    def open(self, prefill_rank: int, peer: LinkPeer) -> None:
        """Begins to make the link, if there is none."""
        self._links.open(peer)

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Tells the peer's rank 0 first tokens, if there is a link to it that can."""
        self._links.tell(peer, words)

    def take(self, event: FrameSent | LinkDown) -> None:
        """Does nothing: these links know themselves what room they have."""

    def ship(self, order: ShipFrame) -> None:
        """Pushes a region: packed, or on a GPU as it lies in its blocks, or will."""
        region, after = order.region, None
        if order.after_step is not None:
            assert self._marks is not None
            assert self._device is not None
            after = self._marks.find(order.after_step, region.layers.stop)
        frame = OutgoingFrame(
            reservation_id=order.reservation_id,
            frame_index=order.frame_index,
            num_bytes=self._kv.frame_bytes(region),
            payload=self._kv.pack(region) if self._device is None else region,
            after=after,
        )
        self._links.push(order.peer, frame)

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently."""
        self._links.cancel(reservation_id)

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        return self._links.links()

    def close(self) -> None:
        """Ends all links."""
        self._links.close()


class RankUnloader:
    """The `Unloader` of one rank."""

    def __init__(
        self, kv: KvTensors, links: FrameReceiver, device: LinkDevice | None = None
    ) -> None:
        """Keeps them; `device` is None on a CPU."""
        self._kv = kv
        self._links = links
        self._device = device

    def endpoints(self) -> tuple[LinkEndpoint, ...]:
        """Returns where this rank listens for links."""
        return (self._links.endpoint(),)

    def expect(self, expected: ExpectedFrames) -> None:
        """Lets links write frames as they land, if they can."""
        self._links.expect(expected)

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Waits until they write a reservation's blocks no more, and never will."""
        self._links.withdraw(reservation_id)

    def unload(self, order: UnloadFrame) -> bool:
        """Scatters at once; on a GPU, in front of whatever step is launched next."""
        payload = self._links.payload(order.landed)
        after: Mark | None = None
        if self._device is None:
            self._kv.scatter(order.region, payload)
        else:
            after = self._device.scatter(order.region, payload)
        self._links.release_slot(order.landed, after)
        return True

    def reject(self, landed: FrameLanded) -> None:
        """Frees the slot."""
        self._links.release_slot(landed)

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        return self._links.links()

    def close(self) -> None:
        """Ends all links and stops listening."""
        self._links.close()


def region_of(frame: Frame, table: tuple[BlockId, ...], block_size: int) -> KvRegion:
    """Finds a frame's place in a sequence's blocks."""
    return make_region(
        table=table,
        block_size=block_size,
        tokens=frame.tokens,
        layers=frame.layers,
        heads=frame.heads,
        dtype=frame.dtype,
    )
