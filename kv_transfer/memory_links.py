"""Links inside one process, without threads or sockets: the twin of the Gloo links for tests."""

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkId, Post, TokensTold
from kv_transfer.expected_frames import ExpectedFrames
from kv_transfer.link_device import Mark
from kv_transfer.protocol import LinkEndpoint, SampledAhead
from kv_transfer.transport import LinkPeer, LinkStatus, OutgoingFrame
from pdserve.request import Incarnation, ReservationId, WorkerId

TRANSPORT = "memory"


@dataclass(slots=True)
class _MemoryLink:
    link_id: LinkId
    """As the sending side sees it."""
    peer: LinkPeer
    receiver: "MemoryReceiver"
    queue: deque[OutgoingFrame] = field(default_factory=deque)
    bytes_sent: int = 0


class MemoryHub:
    """The network: finds receivers by their token."""

    def __init__(self) -> None:
        """Starts without receivers."""
        self.receivers: dict[bytes, MemoryReceiver] = {}


class MemoryReceiver:
    """A `FrameReceiver`; `ring_slots` landing slots per link."""

    def __init__(
        self,
        *,
        hub: MemoryHub,
        incarnation: Incarnation,
        ring_slots: int,
        slot_bytes: int,
        post: Post,
        rank: int = 0,
    ) -> None:
        """Joins the hub."""
        self.incarnation = incarnation
        self.rank = rank
        self.post = post
        self._hub = hub
        self._ring_slots = ring_slots
        self._slot_bytes = slot_bytes
        self._rings: dict[LinkId, dict[int, Tensor]] = {}
        self._senders: dict[LinkId, MemorySender] = {}
        self._token = incarnation.to_bytes(8, "big") + rank.to_bytes(4, "big")
        hub.receivers[self._token] = self

    def endpoint(self) -> LinkEndpoint:
        """Returns where prefill ranks connect, and what they must say."""
        return LinkEndpoint(host="memory", port=1, token=self._token)

    def land(self, link: LinkId, sender: "MemorySender", frame: OutgoingFrame) -> bool:
        """Copies a frame into a free slot; False when none is free."""
        ring = self._rings.setdefault(link, {})
        self._senders[link] = sender
        free = [slot for slot in range(self._ring_slots) if slot not in ring]
        if not free:
            return False
        num_bytes = frame.num_bytes
        assert num_bytes <= self._slot_bytes
        assert isinstance(frame.payload, Tensor)
        ring[free[0]] = frame.payload.clone()
        self.post(
            FrameLanded(
                link=link,
                reservation_id=frame.reservation_id,
                frame_index=frame.frame_index,
                num_bytes=num_bytes,
                slot=free[0],
                is_intact=True,
            )
        )
        return True

    def expect(self, expected: ExpectedFrames) -> None:
        """Does nothing: every frame waits for the engine."""

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Does nothing."""

    def payload(self, landed: FrameLanded) -> Tensor:
        """Returns the landed bytes, uint8 [num_bytes]; valid until `release_slot`."""
        return self._rings[landed.link][landed.slot]

    def release_slot(self, landed: FrameLanded, after: Mark | None = None) -> None:
        """Gives a landing slot back; a frame that waited for one lands at once."""
        # What a late reader would see must not look right.
        self._rings[landed.link].pop(landed.slot).fill_(0xFF)
        self._senders[landed.link].pump(self.incarnation, self.rank)

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists links over which frames came."""
        return tuple(
            LinkStatus(
                peer_worker_id=self._senders[link].worker_id,
                peer=link.peer,
                epoch=link.epoch,
                transport=TRANSPORT,
                bytes_sent=0,
                bytes_received=0,
                frames_in_flight=len(ring),
            )
            for link, ring in self._rings.items()
        )

    def close(self) -> None:
        """Leaves the hub."""
        self._hub.receivers.pop(self._token, None)


class MemorySender:
    """A `FrameSender`; frames land while `push` runs, or when a slot is released."""

    def __init__(
        self,
        *,
        hub: MemoryHub,
        worker_id: WorkerId,
        incarnation: Incarnation,
        ring_slots: int,
        post: Post,
        rank: int = 0,
    ) -> None:
        """Starts without links."""
        self.worker_id = worker_id
        self._hub = hub
        self._incarnation = incarnation
        self._ring_slots = ring_slots
        self._post = post
        self._rank = rank
        self._links: dict[tuple[Incarnation, int], _MemoryLink] = {}
        self._epochs: dict[tuple[Incarnation, int], int] = {}

    def has_room(self, peer: Incarnation, rank: int = 0) -> bool:
        """Says whether a frame for this rank of a peer may be packed and pushed now."""
        link = self._links.get((peer, rank))
        return link is None or len(link.queue) < self._ring_slots

    def open(self, peer: LinkPeer) -> None:
        """Does nothing: a link in memory takes no time to make."""

    def push(self, peer: LinkPeer, frame: OutgoingFrame) -> None:
        """Queues a frame; makes the link first if need be. Answered by FrameSent or LinkDown."""
        key = (peer.incarnation, peer.rank)
        link = self._links.get(key)
        if link is None:
            epoch = self._epochs[key] = self._epochs.get(key, 0) + 1
            link_id = LinkId(peer.incarnation, epoch, peer.rank, self._rank)
            receiver = self._hub.receivers.get(peer.endpoint.token)
            if receiver is None or (receiver.incarnation, receiver.rank) != key:
                self._report_down(link_id, peer, {frame.reservation_id})
                return
            link = self._links[key] = _MemoryLink(link_id, peer, receiver)
        link.queue.append(frame)
        self.pump(*key)

    def pump(self, peer: Incarnation, rank: int = 0) -> None:
        """Lands queued frames while there are slots."""
        link = self._links.get((peer, rank))
        if link is None:
            return
        landing = self._far_id(link)
        while link.queue and link.receiver.land(landing, self, link.queue[0]):
            frame = link.queue.popleft()
            link.bytes_sent += frame.num_bytes
            self._post(
                FrameSent(
                    link=link.link_id,
                    reservation_id=frame.reservation_id,
                    frame_index=frame.frame_index,
                )
            )

    def break_link(self, peer: Incarnation, rank: int = 0) -> None:
        """Kills a link: both ends hear of it."""
        link = self._links.pop((peer, rank))
        lost = {frame.reservation_id for frame in link.queue}
        self._report_down(link.link_id, link.peer, lost)
        link.receiver.post(
            LinkDown(
                link=self._far_id(link),
                worker_id=self.worker_id,
                detail="broken",
            )
        )

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Tells first tokens, if there is a link."""
        link = self._links.get((peer, 0))
        if link is not None:
            link.receiver.post(TokensTold(link=self._far_id(link), words=words))

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently."""
        for link in self._links.values():
            link.queue = deque(f for f in link.queue if f.reservation_id != reservation_id)

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        return tuple(
            LinkStatus(
                peer_worker_id=link.peer.worker_id,
                peer=link.link_id.peer,
                epoch=link.link_id.epoch,
                transport=TRANSPORT,
                bytes_sent=link.bytes_sent,
                bytes_received=0,
                frames_in_flight=len(link.queue),
            )
            for link in self._links.values()
        )

    def close(self) -> None:
        """Forgets all links."""
        self._links.clear()

    def _far_id(self, link: _MemoryLink) -> LinkId:
        """Returns the link's id as the receiving side sees it."""
        return LinkId(self._incarnation, link.link_id.epoch, self._rank, link.receiver.rank)

    def _report_down(self, link_id: LinkId, peer: LinkPeer, lost: set[ReservationId]) -> None:
        self._post(
            LinkDown(link=link_id, worker_id=peer.worker_id, detail="broken", lost=frozenset(lost))
        )
