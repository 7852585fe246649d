"""The seam between engine and links.

Thread rule: the engine's thread calls the methods below; links answer only by `post(event)`, the
engine's inbox, from threads of their own. No method waits for a peer.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kv_transfer.events import FrameLanded
from kv_transfer.protocol import LinkEndpoint
from pdserve.request import Incarnation, ReservationId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPeer:
    """A rank of a decode worker, as a prefill rank's links see it."""

    worker_id: WorkerId
    incarnation: Incarnation
    endpoint: LinkEndpoint
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingFrame:
    """A packed frame; its payload belongs to the link until FrameSent or LinkDown names it."""

    reservation_id: ReservationId
    frame_index: int
    payload: Tensor
    """uint8 [num_bytes], contiguous, on the CPU."""


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

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently; one on the wire is sent to its end."""
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

    def payload(self, landed: FrameLanded) -> Tensor:
        """Returns the landed bytes, uint8 [num_bytes]; valid until `release_slot`."""
        ...

    def release_slot(self, landed: FrameLanded) -> None:
        """Gives a landing slot back to its link, once for each FrameLanded."""
        ...

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        ...

    def close(self) -> None:
        """Closes every link and the listening socket."""
        ...
