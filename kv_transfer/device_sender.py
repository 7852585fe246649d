"""Sends frames out of a GPU's blocks, several at a time, from one thread that never waits long.

Each frame is announced (READY), written by the device, and told of (WRITTEN); what lies between is
the route's. The thread looks in turns at the notice socket and at marks on the device: a peer's
death shows within a turn, and every stage of a frame has a deadline.
"""

import logging
import time
from collections.abc import Callable

from kv_transfer.frame_queue import FrameQueue
from kv_transfer.notices import LinkBroken, NoticeChannel, take_bye
from kv_transfer.outgoing_routes import Flight, OutRoute, Packer
from kv_transfer.transport import OutgoingFrame
from pdserve.cache.kv_region import KvRegion
from pdserve.rpc.v1 import link_pb2

logger = logging.getLogger(__name__)

POLL_S = 20e-6
"""Between two looks at a mark: a frame takes the device 100-200 us."""


class DeviceSender:
    """The sending loop of a link over one of the device's transports. The link's thread only."""

    def __init__(
        self,
        *,
        route: OutRoute,
        packer: Packer,
        queue: FrameQueue,
        channel: NoticeChannel,
        timeout_s: float,
        note_sent: Callable[[OutgoingFrame], None],
    ) -> None:
        """Starts without frames.

        Args:
            route: the transport, ready.
            packer: packs frames.
            queue: what to send.
            channel: to the peer.
            timeout_s: deadline of each stage of a frame.
            note_sent: called with each frame that is through.
        """
        self._route = route
        self._packer = packer
        self._queue = queue
        self._channel = channel
        self._timeout_s = timeout_s
        self._note_sent = note_sent
        self._flights: list[Flight] = []
        self._num_announced = 0
        self._starved_since_s: float | None = None
        """Since when frames wait though none is under way."""

    def run(self) -> None:
        """Sends until the link ends.

        Raises:
            LinkBroken: the peer is gone, too slow, or does not keep to the protocol.
            PeerSaidBye: the peer ends the link.
            DeviceFault: the device failed.
        """
        while self._queue.end is None:
            is_busy = self._take_notices()
            is_busy |= self._begin()
            for flight in self._flights:
                is_busy |= self._route.advance(flight)
            is_busy |= self._finish()
            if not is_busy:
                self._check_deadlines()
                self._rest()

    def settle(self) -> bool:
        """Waits, after the end, until the device touches neither blocks nor the peer's memory.

        Returns:
            False when it still does at the deadline.
        """
        marks = [mark for one in self._flights for mark in (one.read, one.done) if mark is not None]
        deadline_s = time.monotonic() + self._timeout_s
        while not all(mark.is_reached() for mark in marks):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        return True

    def _take_notices(self) -> bool:
        is_busy = False
        while (notice := self._channel.receive(0.0)) is not None:
            is_busy = True
            match notice.WhichOneof("notice"):
                case "frame_posted":
                    self._route.take_posted(notice.frame_posted)
                case "bye":
                    take_bye(notice.bye)
                case other:
                    raise LinkBroken(f"{other} came instead of frame_posted")
        return is_busy

    def _begin(self) -> bool:
        """Launches the packing of as many frames as there is room for, and announces them."""
        is_busy = False
        while self._route.has_room() and self._queue.has_waiting:
            is_busy = True
            if self._packer.delay_s:
                self._queue.pause(self._packer.delay_s)
            frame = self._queue.take(is_waiting=False)
            if frame is None:
                break
            assert isinstance(frame.payload, KvRegion)
            self._num_announced += 1
            flight = Flight(
                frame=frame,
                region=frame.payload,
                sequence=self._num_announced,
                since_s=time.monotonic(),
            )
            self._flights.append(flight)
            try:
                self._route.begin(flight, self._packer)
            finally:
                self._queue.note_read(frame, flight.read)
            ready = link_pb2.FrameReady(
                sequence=flight.sequence,
                reservation_id=frame.reservation_id,
                frame_index=frame.frame_index,
                num_bytes=frame.num_bytes,
                slot=flight.slot,
            )
            self._channel.send(link_pb2.LinkNotice(frame_ready=ready), self._timeout_s)
        return is_busy

    def _finish(self) -> bool:
        """Tells the peer of frames that are written, in their order."""
        is_busy = False
        while self._flights and (done := self._flights[0].done) is not None and done.is_reached():
            is_busy = True
            flight = self._flights.pop(0)
            checksum = None if flight.checksum is None else flight.checksum.value()
            written = link_pb2.FrameWritten(sequence=flight.sequence, checksum=checksum)
            self._channel.send(link_pb2.LinkNotice(frame_written=written), self._timeout_s)
            self._route.finish(flight)
            self._note_sent(flight.frame)
            if self._flights:
                self._flights[0].since_s = time.monotonic()
        return is_busy

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._flights:
            self._starved_since_s = None
            if now - self._flights[0].since_s > self._timeout_s:
                raise LinkBroken(f"a frame took more than {self._timeout_s} s")
        elif self._queue.is_idle:
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now
        elif now - self._starved_since_s > self._timeout_s:
            raise LinkBroken("no landing slot was released in time")

    def _rest(self) -> None:
        """Waits a little for the device, or as long as it takes for the peer or the engine."""
        if any(flight.done is not None for flight in self._flights):
            time.sleep(POLL_S)
        else:
            is_idle = not self._flights and self._queue.is_idle
            self._channel.wait(None if is_idle else self._timeout_s / 4)
