"""Both ends of a link in one object: frames move when a test delivers them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kv_transfer.events import FrameLanded, FrameSent, LinkId, TokensTold
from kv_transfer.expected_frames import ExpectedFrames
from kv_transfer.protocol import LinkEndpoint, SampledAhead
from kv_transfer.transport import LinkPeer, LinkStatus, OutgoingFrame
from pdserve.cache.kv_region import KvRegion
from pdserve.cache.kv_tensors import KvTensors
from pdserve.request import Incarnation, ReservationId

PREFILL, DECODE = Incarnation(11), Incarnation(22)


@dataclass
class MemoryLinks:
    """Sender and receiver of one link at once; frames wait in `in_flight` until delivered."""

    in_flight: deque[OutgoingFrame] = field(default_factory=deque)
    slots: dict[int, Tensor] = field(default_factory=dict)
    corrupt: Callable[[Tensor], None] | None = None
    bytes_sent: int = 0
    log: list[str] = field(default_factory=list)
    told: deque[TokensTold] = field(default_factory=deque)
    """First tokens that were told ahead of their commits; delivered on demand."""
    source: KvTensors | None = None
    """Where frames that are not packed yet lie: they are read when they are delivered."""
    num_awaited: int = 0
    """Frames delivered that were pushed before they were computed."""
    _next_slot: int = 0

    def has_room(self, peer: Incarnation, rank: int = 0) -> bool:
        return len(self.in_flight) < (4 if self.source is None else 64)

    def open(self, peer: LinkPeer) -> None:
        """A link in memory is always there."""

    def push(self, peer: LinkPeer, frame: OutgoingFrame) -> None:
        self.log.append(f"push {frame.frame_index}")
        self.in_flight.append(frame)

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        self.told.append(TokensTold(link=LinkId(PREFILL, 1), words=words))

    def cancel(self, reservation_id: ReservationId) -> None:
        self.in_flight = deque(
            frame for frame in self.in_flight if frame.reservation_id != reservation_id
        )

    def links(self) -> tuple[LinkStatus, ...]:
        return ()

    def close(self) -> None:
        self.in_flight.clear()

    def endpoint(self) -> LinkEndpoint:
        return LinkEndpoint(host="memory", port=1, token=b"token")

    def payload(self, landed: FrameLanded) -> Tensor:
        return self.slots[landed.slot]

    def expect(self, expected: ExpectedFrames) -> None:
        pass

    def withdraw(self, reservation_id: ReservationId) -> None:
        pass

    def release_slot(self, landed: FrameLanded, after: object = None) -> None:
        del self.slots[landed.slot]

    @property
    def has_next(self) -> bool:
        if not self.in_flight:
            return False
        after = self.in_flight[0].after
        return after is None or after.is_reached()

    def deliver(self) -> tuple[FrameSent, FrameLanded]:
        frame = self.in_flight.popleft()
        self.num_awaited += frame.after is not None
        if isinstance(frame.payload, KvRegion):
            assert self.source is not None
            payload = self.source.pack(frame.payload)
        else:
            payload = frame.payload.clone()
        if self.corrupt is not None:
            self.corrupt(payload)
        self._next_slot += 1
        self.slots[self._next_slot] = payload
        self.bytes_sent += payload.numel()
        link = LinkId(PREFILL, 1)
        landed = FrameLanded(
            link=link,
            reservation_id=frame.reservation_id,
            frame_index=frame.frame_index,
            num_bytes=payload.numel(),
            slot=self._next_slot,
            is_intact=True,
        )
        sent = FrameSent(
            link=LinkId(DECODE, 1),
            reservation_id=frame.reservation_id,
            frame_index=frame.frame_index,
        )
        return sent, landed
