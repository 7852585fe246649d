"""The seam between engine and links.

Thread rule: the engine's thread calls the methods below; links answer only by `post(event)`, the
engine's inbox, from threads of their own. No method waits for a peer.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kv_transfer.events import FrameLanded
from kv_transfer.expected_frames import ExpectedFrames
from kv_transfer.link_device import Mark
from kv_transfer.protocol import LinkEndpoint, SampledAhead
from pdserve.cache.kv_marks import KvMark
from pdserve.cache.kv_region import KvRegion
from pdserve.request import Incarnation, ReservationId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPeer:
    """A rank of a decode worker, as a prefill rank's links see it."""

    worker_id: WorkerId
    incarnation: Incarnation
    endpoint: LinkEndpoint
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutgoingFrame:
    """A frame on its way; its payload belongs to the link until FrameSent or LinkDown names it."""

    reservation_id: ReservationId
    frame_index: int
    num_bytes: int
    payload: Tensor | KvRegion
    """Packed: uint8 [num_bytes], contiguous, on the CPU. Or where it lies in a GPU's blocks, from
    which the link reads it; `FrameSender.cancel` tells when that is over."""
    after: KvMark | None = None
    """From where on it is in its blocks, on a GPU; None: it is there."""

    @property
    def is_in_blocks(self) -> bool:
        """True while the link has to read it from its blocks."""
        return isinstance(self.payload, KvRegion)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStatus:
    """One live link, for status pages."""

    peer_worker_id: WorkerId
    peer: Incarnation
    epoch: int
    transport: str
    bytes_sent: int
    bytes_received: int
    frames_in_flight: int
    failures: tuple[str, ...] = ()
    """What was preferred to `transport` and did not come up, in words."""


class FrameSender(Protocol):
    """The links of a prefill rank."""

    def has_room(self, peer: Incarnation, rank: int = 0) -> bool:
        """Says whether a frame for this rank of a peer may be packed and pushed now."""
        ...

    def open(self, peer: LinkPeer) -> None:
        """Begins to make the link, if there is none, so that the first frame need not wait."""
        ...

    def push(self, peer: LinkPeer, frame: OutgoingFrame) -> None:
        """Queues a frame; makes the link first if need be. Answered by FrameSent or LinkDown."""
        ...

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Tells rank 0 of a peer first tokens, if there is a link to it that can; else nothing."""
        ...

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently; one on the wire is sent to its end.

        Steps that the engine launches from now on may overwrite the reservation's blocks.
        """
        ...

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        ...

    def close(self) -> None:
        """Says goodbye on every link and frees all threads, sockets and memory."""
        ...


class FrameReceiver(Protocol):
    """The links of a decode rank."""

    def endpoint(self) -> LinkEndpoint:
        """Returns where prefill ranks connect, and what they must say."""
        ...

    def expect(self, expected: ExpectedFrames) -> None:
        """Lets frames be written as they land, where links can; each is told by FramePlaced."""
        ...

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Ends that; nothing writes the reservation's blocks any more. Unknown ones are fine."""
        ...

    def payload(self, landed: FrameLanded) -> Tensor:
        """Returns the landed bytes, uint8 [num_bytes], valid until `release_slot`."""
        ...

    def release_slot(self, landed: FrameLanded, after: Mark | None = None) -> None:
        """Gives a landing slot back to its link, once for each FrameLanded.

        Args:
            landed: what lay there.
            after: what still reads the slot, on a GPU.
        """
        ...

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        ...

    def close(self) -> None:
        """Closes every link and the listening socket."""
        ...
