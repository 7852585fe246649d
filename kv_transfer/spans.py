"""Spans of hand-offs: packing and scattering of frames, and what links report."""

from kv_transfer.events import FrameLanded, FramePlaced, FrameSent, LinkDown, LinkEnds, TokensTold
from kv_transfer.expected_frames import ExpectedFrames
from kv_transfer.protocol import LinkEndpoint, SampledAhead
from kv_transfer.shipping import ShipFrame, Shipper, Unloader, UnloadFrame
from kv_transfer.transport import LinkPeer, LinkStatus
from pdserve.request import Incarnation, ReservationId
from pdserve.rpc.v1 import rank_pb2
from pdserve.spans import Detail, SpanLog
from pdserve.timeline import Clock


def describe_event(event: object) -> dict[str, Detail]:
    """Says what an event of a rank's inbox is and whose; empty if it is of no hand-off."""
    match event:
        case rank_pb2.ToRank():
            return _describe_message(event)
        case FrameSent():
            sent = {"event": "frame sent", **_frame(event.reservation_id, event.frame_index)}
            if event.on_link_s is not None:
                sent["on_link_us"] = round(1e6 * event.on_link_s)
            return sent
        case TokensTold():
            return {"event": "tokens told", "reservation": event.words.reservation_id.hex()}
        case FrameLanded():
            return {"event": "frame landed", **_frame(event.reservation_id, event.frame_index)}
        case FramePlaced():
            return {"event": "frame placed", **_frame(event.reservation_id, event.frame_index)}
        case _:
            return {}


class SpanShipper:
    """A `Shipper` whose frames are noted as they are packed."""

    def __init__(self, shipper: Shipper, spans: SpanLog, clock: Clock) -> None:
        """Wraps a shipper."""
        self._shipper = shipper
        self._spans = spans
        self._clock = clock

    def has_room(self, ends: LinkEnds) -> bool:
        """Passes it on."""
        return self._shipper.has_room(ends)

    def open(self, prefill_rank: int, peer: LinkPeer) -> None:
        """Passes it on."""
        self._shipper.open(prefill_rank, peer)

    def ship(self, order: ShipFrame) -> None:
        """Ships a frame, and notes what packing it took on the host."""
        started_s = self._clock.now()
        self._shipper.ship(order)
        frame = _frame(order.reservation_id, order.frame_index)
        self._spans.note("pack", started_s, self._clock.now(), **frame)

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Passes it on."""
        self._shipper.tell(peer, words)

    def take(self, event: FrameSent | LinkDown) -> None:
        """Passes it on."""
        self._shipper.take(event)

    def cancel(self, reservation_id: ReservationId) -> None:
        """Passes it on."""
        self._shipper.cancel(reservation_id)

    def links(self) -> tuple[LinkStatus, ...]:
        """Passes it on."""
        return self._shipper.links()

    def close(self) -> None:
        """Passes it on."""
        self._shipper.close()


class SpanUnloader:
    """An `Unloader` whose frames are noted as they are scattered."""

    def __init__(self, unloader: Unloader, spans: SpanLog, clock: Clock) -> None:
        """Wraps an unloader."""
        self._unloader = unloader
        self._spans = spans
        self._clock = clock

    def endpoints(self) -> tuple[LinkEndpoint, ...]:
        """Passes it on."""
        return self._unloader.endpoints()

    def expect(self, expected: ExpectedFrames) -> None:
        """Passes it on."""
        self._unloader.expect(expected)

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Passes it on."""
        self._unloader.withdraw(reservation_id)

    def unload(self, order: UnloadFrame) -> bool:
        """Unloads a frame, and notes what that took on the host."""
        started_s = self._clock.now()
        is_done = self._unloader.unload(order)
        landed = order.landed
        frame = _frame(landed.reservation_id, landed.frame_index)
        self._spans.note("scatter", started_s, self._clock.now(), **frame)
        return is_done

    def reject(self, landed: FrameLanded) -> None:
        """Passes it on."""
        self._unloader.reject(landed)

    def links(self) -> tuple[LinkStatus, ...]:
        """Passes it on."""
        return self._unloader.links()

    def close(self) -> None:
        """Passes it on."""
        self._unloader.close()


def _frame(reservation_id: ReservationId, index: int) -> dict[str, Detail]:
    return {"reservation": reservation_id.hex(), "frame": index}


def _describe_message(message: rank_pb2.ToRank) -> dict[str, Detail]:
    kind = message.WhichOneof("message")
    match kind:
        case "submit":
            return {"event": kind, "request": message.submit.request.request_id}
        case "reserve":
            request_id = message.reserve.request.request_id
            return {"event": kind, "request": request_id}
        case "commit":
            handoff_id = message.commit.envelope.handoff_id
            return {"event": kind, "handoff": handoff_id}
        case "peer_reply":
            return {"event": f"answer to {message.peer_reply.WhichOneof('reply')}"}
        case _:
            return {}
