"""Receives frames over a Gloo link into a ring in host memory."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.arrivals import Arrivals
from kv_transfer.landing_ring import LandingRing
from kv_transfer.links import Link, checksum
from kv_transfer.notices import LinkBroken, NoticeChannel, take_bye
from pdserve.rpc.v1 import link_pb2


@dataclass(frozen=True, slots=True)
class _Arrived:
    ready: link_pb2.FrameReady
    slot: int


class GlooReceiver:
    """The receiving loop of a Gloo link. The link's thread only."""

    def __init__(
        self,
        *,
        link: Link,
        ring: LandingRing,
        channel: NoticeChannel,
        timeout_s: float,
        has_ended: Callable[[], bool],
        arrivals: Arrivals,
    ) -> None:
        """Starts without frames."""
        self._link = link
        self._ring = ring
        self._channel = channel
        self._timeout_s = timeout_s
        self._has_ended = has_ended
        self._arrivals = arrivals
        self.num_announced = 0
        """Frames on their way."""

    def run(self) -> None:
        """Receives a frame, posts the next one's slot if it is announced, then checks the first.

        Raises:
            LinkBroken: the peer is gone, too slow, or does not keep to the protocol.
            PeerSaidBye: the peer ends the link.
        """
        arrived: _Arrived | None = None
        try:
            while True:
                notice = self._channel.receive(None if arrived is None else 0.0)
                if notice is None:
                    self._deliver(arrived)
                    arrived = None
                    continue
                if notice.WhichOneof("notice") == "bye":
                    take_bye(notice.bye)
                if notice.WhichOneof("notice") != "frame_ready":
                    raise LinkBroken(f"{notice.WhichOneof('notice')} came instead of frame_ready")
                ready = notice.frame_ready
                if not 0 < ready.num_bytes <= self._ring.slot_bytes:
                    raise LinkBroken(
                        f"a frame of {ready.num_bytes} bytes for {self._ring.slot_bytes}"
                    )
                slot = self._ring.take()
                if slot is None:
                    self._deliver(arrived)
                    arrived = None
                    slot = self._wait_for_slot()
                self.num_announced += 1
                work = self._link.post_receive(self._ring.slot(slot, ready.num_bytes))
                posted = link_pb2.FramePosted(sequence=ready.sequence)
                self._channel.send(link_pb2.LinkNotice(frame_posted=posted), self._timeout_s)
                self._deliver(arrived)
                arrived = None
                self._link.wait(work, self._timeout_s)
                arrived = _Arrived(ready, slot)
        finally:
            # A frame that came whole is good, whatever befell the link after it.
            self._deliver(arrived)

    def _wait_for_slot(self) -> int:
        slot = self._ring.wait_and_take(self._timeout_s, self._has_ended)
        if slot is None:
            raise LinkBroken("no landing slot was released in time")
        return slot

    def _deliver(self, arrived: _Arrived | None) -> None:
        if arrived is None:
            return
        ready, slot = arrived.ready, arrived.slot
        is_intact = True
        if ready.HasField("crc32"):
            is_intact = checksum(self._ring.slot(slot, ready.num_bytes)) == ready.crc32
        self.num_announced -= 1
        self._ring.land(slot)
        self._arrivals.note_landed(ready, slot, is_intact=is_intact)
