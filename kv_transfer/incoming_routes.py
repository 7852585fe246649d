"""How frames reach a GPU: written into the landing ring by the peer, or through NCCL.

push:  POSTED grants a slot -> READY: the peer writes it -> WRITTEN
nccl:  POSTED grants a slot -> READY: the receive is launched -> WRITTEN and received
"""

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.landing_ring import LandingRing
from kv_transfer.link_device import FrameSum, Lane, LinkDevice, Mark, NcclEnd
from kv_transfer.notices import LinkBroken, NoticeChannel
from pdserve.rpc.v1 import link_pb2


@dataclass(slots=True, eq=False, kw_only=True)
class Landing:
    """A frame on its way in."""

    ready: link_pb2.FrameReady
    since_s: float
    """When it was announced, or the one before it landed."""
    slot: int = 0
    received: Mark | None = None
    """Behind what this end has launched for it; None while nothing has to be."""
    written: link_pb2.FrameWritten | None = None
    checksum: FrameSum | None = None
    checked: Mark | None = None
    """Behind the checksum, and the writing if it is placed."""
    is_placed: bool = False
    """It is written to its blocks by this link."""


class InRoute(Protocol):
    """What a transport does for a receiver. Belongs to the link's thread."""

    transport: str
    waits_for_peer: bool
    """The peer writes the ring by itself: it stays mapped until the peer has let go."""

    def accept(self, landing: Landing) -> None:
        """Prepares for an announced frame.

        Raises:
            LinkBroken: its slot was not granted.
        """
        ...

    def has_arrived(self, landing: Landing) -> bool:
        """Says whether all bytes of a frame that is WRITTEN are there."""
        ...

    def grant(self) -> bool:
        """Tells the peer of free slots; says whether there were any."""
        ...

    def abort(self) -> None:
        """Ends what may hang."""
        ...


class GrantingRing:
    """Grants free slots of a ring to the peer, and knows which it has."""

    def __init__(self, ring: LandingRing, channel: NoticeChannel, timeout_s: float) -> None:
        """Starts with none granted."""
        self._ring = ring
        self._channel = channel
        self._timeout_s = timeout_s
        self._granted: set[int] = set()

    def take(self, slot: int) -> int:
        """Takes the slot that the peer names for a frame.

        Raises:
            LinkBroken: it was not granted.
        """
        if slot not in self._granted:
            raise LinkBroken(f"the peer writes slot {slot}, which was not granted")
        self._granted.remove(slot)
        return slot

    def grant(self) -> bool:
        """Grants every free slot; says whether there were any."""
        notices: list[link_pb2.LinkNotice] = []
        while self._ring.has_free and (slot := self._ring.take()) is not None:
            self._granted.add(slot)
            posted = link_pb2.FramePosted(slot=slot)
            notices.append(link_pb2.LinkNotice(frame_posted=posted))
        if notices:
            self._channel.send_all(notices, self._timeout_s)
        return bool(notices)


class PushIn:
    """The peer writes by itself."""

    transport = "push"
    waits_for_peer = True

    def __init__(self, granting: GrantingRing) -> None:
        """Keeps the ring."""
        self._granting = granting

    def accept(self, landing: Landing) -> None:
        """Takes the slot that the peer names."""
        landing.slot = self._granting.take(landing.ready.slot)

    def has_arrived(self, landing: Landing) -> bool:
        """True: WRITTEN is sent when the peer's device is done."""
        return True

    def grant(self) -> bool:
        """Grants every free slot."""
        return self._granting.grant()

    def abort(self) -> None:
        """Does nothing: nothing was launched here."""


class NcclIn:
    """Receives are launched one by one, in the order of the announcements."""

    transport = "nccl"
    waits_for_peer = False

    def __init__(
        self, granting: GrantingRing, ring: LandingRing, device: LinkDevice, end: NcclEnd
    ) -> None:
        """Takes over the communicator's end."""
        self._granting = granting
        self._ring = ring
        self._end = end
        self._lane: Lane = device.make_lane()

    def accept(self, landing: Landing) -> None:
        """Takes the slot that the peer names, and launches the receive."""
        landing.slot = slot = self._granting.take(landing.ready.slot)
        self._lane.receive(self._end, self._ring.slot(slot, landing.ready.num_bytes))
        landing.received = self._lane.mark()

    def has_arrived(self, landing: Landing) -> bool:
        """Says whether the receive is done."""
        return landing.received is not None and landing.received.is_reached()

    def grant(self) -> bool:
        """Grants every free slot."""
        return self._granting.grant()

    def abort(self) -> None:
        """Aborts the communicator: a receive whose peer is gone never ends by itself."""
        self._end.abort()
