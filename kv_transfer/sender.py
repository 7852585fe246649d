"""The sending end of links: one per decode worker's life, made on first use."""

from dataclasses import dataclass

from kv_transfer.events import Post
from kv_transfer.transport import LinkPeer, LinkStatus, OutgoingFrame
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderIdentity:
    """Who sends."""

    worker_id: WorkerId
    incarnation: Incarnation
    host: str
    """Local address of the links."""


class LinkPool:
    """A `FrameSender` over Gloo links; the least recently used idle link makes room for a new one.

    Called from one thread. A link that died is replaced on the next push, under the next epoch.
    """

    def __init__(
        self,
        *,
        me: SenderIdentity,
        config: HandoffConfig,
        post: Post,
        faults: FaultConfig | None = None,
        max_links: int = 64,
    ) -> None:
        """Starts without links."""
        raise NotImplementedError

    def has_room(self, peer: Incarnation) -> bool:
        """Says whether a frame for this peer may be packed and pushed now."""
        raise NotImplementedError

    def push(self, peer: LinkPeer, frame: OutgoingFrame) -> None:
        """Queues a frame; makes the link first if need be. Answered by FrameSent or LinkDown."""
        raise NotImplementedError

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently; one on the wire is sent to its end."""
        raise NotImplementedError

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        raise NotImplementedError

    def close(self) -> None:
        """Says goodbye on every link and frees all threads, sockets and memory."""
        raise NotImplementedError
