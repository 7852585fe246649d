"""Sends frames out of a GPU's blocks, several at a time.

Each frame is launched on the device (BEGUN), announced (READY), and told of when the device has
written it (WRITTEN); what lies between is the route's. Frames begin on the engine's own thread if
there is room as it pushes them: it holds the interpreter's lock already, and the link's thread
would wait for it again and again. The rest begin on the link's thread, which looks in turns at the
notice socket and at marks on the device: a peer's death shows within a turn, and every stage of a
frame has a deadline. Words go out on the engine's thread, too, unless the link's thread is sending.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kv_transfer import codec
from kv_transfer.frame_queue import FrameQueue
from kv_transfer.notices import LinkBroken, NoticeChannel, take_bye
from kv_transfer.outgoing_routes import Flight, OutRoute, Packer
from kv_transfer.transport import OutgoingFrame
from pdserve.cache.kv_region import KvRegion
from pdserve.rpc.v1 import link_pb2

POLL_S = 25e-6
EXPECTED_BYTES_PER_S = 400e9
"""No link between GPUs is faster: nobody looks at a mark before a frame can be through."""
MAX_REST_S = 500e-6
AWAIT_S = 200e-6
"""Between looks at a step that computes the next frame: each takes the interpreter's lock, which
the engine's thread needs to launch the step behind."""


class DeviceSender:
    """The sending loop of a link over one of the device's transports.

    `begin` and `tell` belong to the link's thread and the engine's, the rest to the link's thread.
    """

    def __init__(
        self,
        *,
        route: OutRoute,
        packer: Packer,
        queue: FrameQueue,
        channel: NoticeChannel,
        timeout_s: float,
        note_sent: Callable[[OutgoingFrame, float], None],
    ) -> None:
        """Starts without frames.

        Args:
            route: the transport, ready.
            packer: packs frames.
            queue: what to send.
            channel: to the peer.
            timeout_s: deadline of each stage of a frame.
            note_sent: called with each frame that is through, and how long that took in seconds.
        """
        self._route = route
        self._packer = packer
        self._queue = queue
        self._channel = channel
        self._timeout_s = timeout_s
        self._note_sent = note_sent
        self._lock = threading.Lock()
        """Held while frames begin. All else that both threads touch is a deque, to which one adds
        and from which the other takes."""
        self._sending = threading.Lock()
        """Held while notices are sent."""
        self._flights: deque[Flight] = deque()
        self._num_begun = 0
        self._free_at_s = 0.0
        """When what was begun may be through, at the earliest."""
        self._starved_since_s: float | None = None
        """Since when frames wait though none is under way."""

    def begin(self, max_frames: int) -> bool:
        """Launches the reading of waiting frames, if there is room; says whether there were any.

        Does nothing while the other thread is at it: what that leaves, the link's thread takes in
        its next turn.

        Raises:
            LinkBroken: a frame does not fit.
            DeviceFault: the device failed.
        """
        count = 0
        # Never waited for: who sleeps for a lock wakes 0.2 ms after it was given back.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while count < max_frames and self._route.has_room() and self._queue.has_waiting:
                if self._packer.delay_s:
                    self._queue.pause(self._packer.delay_s)
                frame = self._queue.take(is_waiting=False)
                if frame is None:
                    break
                self._launch(frame)
                count += 1
        finally:
            self._lock.release()
        return count > 0

    def tell(self, *, is_patient: bool) -> bool:
        """Sends the words that wait; says whether there were any.

        Args:
            is_patient: wait for the other thread, and for the peer to take them. Else the link's
                thread finds what is left in its next turn.

        Raises:
            LinkBroken: the peer is gone, or takes nothing.
        """
        if self._queue.next_words is None or not self._sending.acquire(blocking=is_patient):
            return False
        count = 0
        try:
            # Nothing may follow the goodbye.
            while self._queue.end is None and (words := self._queue.next_words) is not None:
                notice = link_pb2.LinkNotice(tokens_sampled=codec.sampled_to_wire(words))
                if is_patient:
                    self._channel.send(notice, self._timeout_s)
                elif not self._channel.try_send(notice):
                    break
                self._queue.drop_words()
                count += 1
        finally:
            self._sending.release()
        return count > 0

    def say_goodbye(self, failure: str) -> None:
        """Tells the peer that nothing more comes; the queue has ended before."""
        with self._sending:
            self._channel.say_goodbye(failure)

    def run(self) -> None:
        """Sends until the link ends.

        Raises:
            LinkBroken: the peer is gone, too slow, or does not keep to the protocol.
            PeerSaidBye: the peer ends the link.
            DeviceFault: the device failed.
        """
        while self._queue.end is None:
            is_busy = self._take_notices()
            is_busy |= self.tell(is_patient=True)
            # One at a time: word of those that are through must not wait for all that begin.
            is_busy |= self.begin(1)
            is_busy |= self._note_computed()
            is_busy |= self._announce()
            is_busy |= self._advance()
            is_busy |= self._finish()
            if not is_busy:
                self._check_deadlines()
                self._rest()

    def settle(self) -> bool:
        """Waits, after the end, until the device touches neither blocks nor the peer's memory.

        Returns:
            False when it still does at the deadline.
        """
        with self._lock:
            flights = list(self._flights)
        marks = [mark for one in flights for mark in (one.read, one.done) if mark is not None]
        deadline_s = time.monotonic() + self._timeout_s
        while not all(mark.is_reached() for mark in marks):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        return True

    def _launch(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame.payload, KvRegion)
        self._num_begun += 1
        self._starved_since_s = None
        now = time.monotonic()
        flight = Flight(
            frame=frame,
            region=frame.payload,
            sequence=self._num_begun,
            since_s=now,
            awaited=frame.after,
        )
        self._flights.append(flight)
        try:
            self._route.begin(flight, self._packer)
        finally:
            self._queue.note_read(frame, flight.read)
        if flight.awaited is None:
            self._expect(flight, now)

    def _expect(self, flight: Flight, now_s: float) -> None:
        """Works out when a frame may be through whose blocks can be read from now on."""
        flight.readable_at_s = now_s
        begins_at_s = max(self._free_at_s, now_s)
        flight.expected_at_s = begins_at_s + flight.frame.num_bytes / EXPECTED_BYTES_PER_S
        self._free_at_s = flight.expected_at_s

    def _note_computed(self) -> bool:
        """Notes which frames are in their blocks by now; they are computed in their order."""
        is_busy = False
        for flight in self._snapshot():
            if flight.awaited is None:
                continue
            if not flight.awaited.is_reached():
                break
            is_busy = True
            flight.awaited, flight.since_s = None, time.monotonic()
            # The device may have been there since the last look.
            self._expect(flight, flight.since_s - AWAIT_S)
        return is_busy

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

    def _announce(self) -> bool:
        """Tells of frames that have begun: the peer launches its part, or at least is awake."""
        is_busy = False
        for flight in self._snapshot():
            # A receive that is posted for it occupies the peer. One that was not read yet may still
            # be about to get its slot, on the engine's thread.
            has_begun = flight.read is not None and flight.awaited is None
            if has_begun and not flight.is_announced:
                flight.is_announced = is_busy = True
                self._send((self._ready(flight),))
        return is_busy

    def _advance(self) -> bool:
        is_busy = False
        if self._route.goes_on:
            for flight in self._snapshot():
                is_busy |= flight.awaited is None and self._route.advance(flight)
        return is_busy

    def _finish(self) -> bool:
        """Tells the peer of frames that are written, in their order."""
        is_busy = False
        while True:
            flight = self._flights[0] if self._flights else None
            if flight is None or flight.done is None or not flight.done.is_reached():
                return is_busy
            is_busy = True
            checksum = None if flight.checksum is None else flight.checksum.value()
            written = link_pb2.FrameWritten(sequence=flight.sequence, checksum=checksum)
            notices = [link_pb2.LinkNotice(frame_written=written)]
            if not flight.is_announced:
                notices.insert(0, self._ready(flight))
            self._send(notices)
            self._flights.popleft()
            self._route.finish(flight)
            if self._flights:
                self._flights[0].since_s = time.monotonic()
            now_s = time.monotonic()
            # Both may have been seen in one look.
            since_s = now_s if flight.awaited is not None else flight.readable_at_s
            self._note_sent(flight.frame, now_s - since_s)

    def _ready(self, flight: Flight) -> link_pb2.LinkNotice:
        ready = link_pb2.FrameReady(
            sequence=flight.sequence,
            reservation_id=flight.frame.reservation_id,
            frame_index=flight.frame.frame_index,
            num_bytes=flight.frame.num_bytes,
            slot=flight.slot,
        )
        return link_pb2.LinkNotice(frame_ready=ready)

    def _send(self, notices: Sequence[link_pb2.LinkNotice]) -> None:
        with self._sending:
            self._channel.send_all(notices, self._timeout_s)

    def _snapshot(self) -> list[Flight]:
        return list(self._flights)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        since_s = self._flights[0].since_s if self._flights else None
        if since_s is not None:
            self._starved_since_s = None
            if now - since_s > self._timeout_s:
                raise LinkBroken(f"a frame took more than {self._timeout_s} s")
        elif self._queue.is_idle:
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now
        elif now - self._starved_since_s > self._timeout_s:
            raise LinkBroken("no landing slot was released in time")

    def _rest(self) -> None:
        """Waits for what can be next: the device, the peer, or the engine."""
        flights = self._snapshot()
        computed = [flight for flight in flights if flight.awaited is None]
        if computed and computed[0].done is not None:
            left_s = computed[0].expected_at_s - time.monotonic()
            time.sleep(min(max(left_s, POLL_S), MAX_REST_S))
        elif any(flight.done is not None for flight in computed):
            time.sleep(POLL_S)
        elif len(computed) < len(flights):
            time.sleep(AWAIT_S)
        else:
            is_idle = not flights and self._queue.is_idle
            self._channel.wait(None if is_idle else self._timeout_s / 4)
