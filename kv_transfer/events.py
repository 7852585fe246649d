"""What links report to the engine; plain data, posted to the engine's inbox from link threads."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.protocol import SampledAhead
from pdserve.request import Incarnation, ReservationId, WorkerId


@dataclass(frozen=True, slots=True)
class LinkId:
    """One life of the link between two ranks; a new one has a higher epoch."""

    peer: Incarnation
    """Of the worker at the far end."""
    epoch: int
    peer_rank: int = 0
    own_rank: int = 0

    @property
    def ends(self) -> "LinkEnds":
        """The two ranks, whatever the epoch."""
        return LinkEnds(self.peer, self.peer_rank, self.own_rank)


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """A rank of a peer and a rank of this worker; all links between them follow one another."""

    peer: Incarnation
    peer_rank: int
    own_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameLanded:
    """A frame lies in a landing slot. The engine scatters or rejects it, then frees the slot."""

    link: LinkId
    reservation_id: ReservationId
    frame_index: int
    num_bytes: int
    slot: int
    is_intact: bool
    """False: its checksum does not match."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FramePlaced:
    """A frame that was expected lies in its blocks, and its slot is free again."""

    link: LinkId
    reservation_id: ReservationId
    frame_index: int
    num_bytes: int
    is_intact: bool
    """False: its checksum does not match."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSent:
    """A frame has left this worker; whether it landed shows in the answer to the commit."""

    link: LinkId
    reservation_id: ReservationId
    frame_index: int
    on_link_s: float | None = None
    """Since it was both given to the link and computed; None where nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkDown:
    """A link died. It is dead for good; the next use makes another one."""

    link: LinkId
    worker_id: WorkerId
    detail: str
    lost: frozenset[ReservationId] = frozenset()
    """On the sending side: reservations with frames that were not sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameUnloaded:
    """Another rank of this worker has copied a frame into its blocks."""

    reservation_id: ReservationId
    frame_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensTold:
    """A prefill worker tells first tokens ahead of their commit."""

    link: LinkId
    words: SampledAhead


LinkEvent = FrameLanded | FramePlaced | FrameSent | LinkDown | TokensTold

Post = Callable[[LinkEvent], None]
"""Puts an event into the engine's inbox; safe to call from any thread, never blocks."""
