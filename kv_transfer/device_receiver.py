"""Receives frames into a ring on the GPU, from one thread that never waits long.

Each frame is announced (READY), told of when it is there (WRITTEN), checked on the device, and
given to the engine, in the order of the announcements. The thread looks in turns at the notice
socket and at marks on the device: a peer's death shows within a turn, and every stage has a
deadline.
"""

import time
from collections.abc import Callable
from functools import partial

from kv_transfer.arrivals import Arrivals
from kv_transfer.incoming_routes import InRoute, Landing
from kv_transfer.landing_ring import LandingRing
from kv_transfer.link_device import Lane, LinkDevice, Mark
from kv_transfer.notices import LinkBroken, NoticeChannel, take_bye
from pdserve.cache.kv_region import KvRegion
from pdserve.rpc.v1 import link_pb2

POLL_S = 25e-6
"""A frame of 64 MiB is checked in 30 us."""
SLOW_POLL_S = 50e-6
"""For what takes longer, or nobody waits for."""
EAGER_S = 2e-3
"""How soon a frame is there that was just announced, unless it waits for its layers."""
MAX_ANNOUNCED = 256
"""Frames that a peer may announce ahead."""


class DeviceReceiver:
    """The receiving loop of a link over one of the device's transports. The link's thread only."""

    def __init__(
        self,
        *,
        route: InRoute,
        ring: LandingRing,
        device: LinkDevice,
        channel: NoticeChannel,
        timeout_s: float,
        has_ended: Callable[[], bool],
        arrivals: Arrivals,
    ) -> None:
        """Starts without frames.

        Args:
            route: the transport, prepared.
            ring: where frames land.
            device: what checks them.
            channel: to the peer.
            timeout_s: deadline of each stage of a frame.
            has_ended: asked in each turn.
            arrivals: tells the engine of what has come.
        """
        self._route = route
        self._ring = ring
        self._channel = channel
        self._timeout_s = timeout_s
        self._has_ended = has_ended
        self._arrivals = arrivals
        self._checks: Lane = device.make_lane()
        self._announced: list[Landing] = []
        """In the order of their sequence."""
        self._last_sequence = 0
        self._told_at_s = 0.0
        """When the latest frame was announced."""

    @property
    def num_announced(self) -> int:
        """Frames on their way."""
        return len(self._announced)

    def run(self) -> None:
        """Receives until the link ends.

        Raises:
            LinkBroken: the peer is gone, too slow, or does not keep to the protocol.
            PeerSaidBye: the peer ends the link.
            DeviceFault: the device failed.
        """
        while not self._has_ended():
            is_busy = self._take_notices()
            if self._announced:
                is_busy |= self._check()
                is_busy |= self._land()
            if self._ring.is_draining:
                is_busy |= self._ring.reclaim() > 0
            is_busy |= self._route.grant()
            if not is_busy:
                self._check_deadlines()
                self._rest()

    def settle(self) -> bool:
        """Waits, after the end, until nothing launched here writes the ring any more.

        Returns:
            False when something still does at the deadline.
        """
        marks = [one.received for one in self._announced if one.received is not None]
        marks += [one.checked for one in self._announced if one.checked is not None]
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
                case "frame_ready":
                    self._announce(notice.frame_ready)
                case "frame_written":
                    self._note_written(notice.frame_written)
                case "tokens_sampled":
                    self._arrivals.note_told(notice.tokens_sampled)
                case "bye":
                    take_bye(notice.bye)
                case other:
                    raise LinkBroken(f"{other} came instead of frame_ready")
        return is_busy

    def _announce(self, ready: link_pb2.FrameReady) -> None:
        if not 0 < ready.num_bytes <= self._ring.slot_bytes:
            raise LinkBroken(f"a frame of {ready.num_bytes} bytes for {self._ring.slot_bytes}")
        if ready.sequence != self._last_sequence + 1 or len(self._announced) >= MAX_ANNOUNCED:
            raise LinkBroken(f"frame {ready.sequence} was announced out of turn")
        self._last_sequence = ready.sequence
        landing = Landing(ready=ready, since_s=time.monotonic())
        # At once: word that it is written may be the next notice.
        self._route.accept(landing)
        self._announced.append(landing)
        self._told_at_s = landing.since_s

    def _note_written(self, written: link_pb2.FrameWritten) -> None:
        for landing in self._announced:
            if landing.ready.sequence == written.sequence:
                landing.written = written
                return
        raise LinkBroken(f"frame {written.sequence} was written out of turn")

    def _check(self) -> bool:
        """Launches the writing of frames that are there, or at least their checksums."""
        is_busy = False
        for landing in self._announced:
            written = landing.written
            if written is None or landing.checked is not None:
                continue
            if not self._route.has_arrived(landing):
                continue
            landing.is_placed = self._arrivals.place(landing.ready, partial(self._write, landing))
            if not landing.is_placed and written.HasField("checksum"):
                frame = self._ring.slot(landing.slot, landing.ready.num_bytes)
                landing.checksum = self._checks.add_up(frame)
            if landing.is_placed or written.HasField("checksum"):
                landing.checked = self._checks.mark()
                is_busy = True
        return is_busy

    def _write(self, landing: Landing, region: KvRegion) -> Mark:
        assert landing.written is not None
        frame = self._ring.slot(landing.slot, landing.ready.num_bytes)
        has_sum = landing.written.HasField("checksum")
        landing.checksum = self._checks.scatter(region, frame, has_sum=has_sum)
        return self._checks.mark()

    def _land(self) -> bool:
        """Gives frames that are there, and checked, to the engine."""
        is_busy = False
        while self._announced and self._is_through(self._announced[0]):
            landing = self._announced.pop(0)
            assert landing.written is not None
            is_intact = True
            if landing.checksum is not None:
                is_intact = landing.checksum.value() == landing.written.checksum
            if landing.is_placed:
                self._ring.give_back(landing.slot)
                self._arrivals.note_placed(landing.ready, is_intact=is_intact)
            else:
                self._ring.land(landing.slot)
                self._arrivals.note_landed(landing.ready, landing.slot, is_intact=is_intact)
            is_busy = True
            if self._announced:
                self._announced[0].since_s = time.monotonic()
        return is_busy

    def _is_through(self, landing: Landing) -> bool:
        if landing.written is None:
            return False
        if landing.is_placed or landing.written.HasField("checksum"):
            return landing.checked is not None and landing.checked.is_reached()
        return self._route.has_arrived(landing)

    def _check_deadlines(self) -> None:
        if not self._announced:
            return
        first = self._announced[0]
        if time.monotonic() - first.since_s > self._timeout_s:
            raise LinkBroken(f"a frame took more than {self._timeout_s} s")

    def _rest(self) -> None:
        """Waits for what can be next: the device, the peer, or the engine."""
        if any(one.checked is not None or one.written is not None for one in self._announced):
            time.sleep(POLL_S)
        elif self._ring.is_draining or any(one.received is not None for one in self._announced):
            time.sleep(SLOW_POLL_S)
        elif self._announced and time.monotonic() - self._told_at_s < EAGER_S:
            # A thread that sleeps for good takes four times as long to wake.
            time.sleep(POLL_S)
        else:
            self._channel.wait(self._timeout_s / 4 if self._announced else None)
