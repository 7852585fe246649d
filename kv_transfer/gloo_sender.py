"""Sends packed frames over a Gloo link, one after another."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import Work

from kv_transfer.faults import FrameFaults
from kv_transfer.frame_queue import FrameQueue
from kv_transfer.link_device import Lane, LinkDevice
from kv_transfer.links import Link, checksum
from kv_transfer.notices import LinkBroken, NoticeChannel
from kv_transfer.transport import OutgoingFrame
from pdserve.cache.kv_marks import KvMark
from pdserve.config.worker import HandoffConfig
from pdserve.rpc.v1 import link_pb2

POLL_S = 20e-6
AWAIT_S = 200e-6
"""Between looks at a step that computes a frame."""


class HostPacker:
    """Brings frames of a GPU into pinned host memory. The link's thread only."""

    def __init__(self, device: LinkDevice, queue: FrameQueue, timeout_s: float) -> None:
        """Starts without memory on the device."""
        self._device = device
        self._queue = queue
        self._timeout_s = timeout_s
        self._lane: Lane = device.make_lane()

    def pack(self, frame: OutgoingFrame) -> Tensor:
        """Returns a frame's bytes in host memory.

        Raises:
            LinkBroken: the device does not come to it in time.
        """
        if isinstance(frame.payload, Tensor):
            return frame.payload
        host = self._device.make_host_frame(frame.num_bytes)
        try:
            if frame.after is not None:
                self._lane.wait_for(frame.after)
            self._lane.gather_to_host(frame.payload, host)
            done = self._lane.mark()
        except BaseException:
            self._queue.note_read(frame, None)
            raise
        self._queue.note_read(frame, done)
        deadline_s = time.monotonic() + self._timeout_s
        if frame.after is not None:
            self._wait(frame.after, AWAIT_S, deadline_s)
        self._wait(done, POLL_S, deadline_s)
        return host

    def _wait(self, mark: KvMark, poll_s: float, deadline_s: float) -> None:
        while not mark.is_reached():
            if time.monotonic() > deadline_s:
                raise LinkBroken(f"packing took more than {self._timeout_s} s")
            time.sleep(poll_s)


@dataclass(frozen=True, slots=True)
class _Announced:
    frame: OutgoingFrame
    payload: Tensor
    sequence: int


class GlooSender:
    """The sending loop of a Gloo link. The link's thread only."""

    def __init__(
        self,
        *,
        link: Link,
        packer: HostPacker | None,
        queue: FrameQueue,
        channel: NoticeChannel,
        config: HandoffConfig,
        faults: FrameFaults,
        note_sent: Callable[[OutgoingFrame], None],
    ) -> None:
        """`packer` is None where frames come packed."""
        self._link = link
        self._packer = packer
        self._queue = queue
        self._channel = channel
        self._config = config
        self._faults = faults
        self._note_sent = note_sent
        self._num_announced = 0

    def run(self) -> None:
        """Sends one frame; while it travels, packs, checksums and announces the next.

        Raises:
            LinkBroken: the peer is gone or too slow.
        """
        timeout_s = self._config.frame_timeout_s
        announced: _Announced | None = None
        while True:
            if announced is None:
                announced = self._announce(is_waiting=True)
            if announced is None:
                return
            posted = self._channel.expect("frame_posted", timeout_s).frame_posted
            if posted.sequence != announced.sequence:
                raise LinkBroken("the wrong frame was posted")
            work: Work = self._link.send(announced.payload)
            following = self._announce(is_waiting=False)
            self._link.wait(work, timeout_s)
            self._note_sent(announced.frame)
            announced = following

    def _announce(self, *, is_waiting: bool) -> _Announced | None:
        """Takes the next frame and announces it; None: there is none, or the link ends.

        One that is not computed yet is waited for only where nothing else is to be done.
        """
        frame = self._queue.take(is_waiting=is_waiting, is_computed=not is_waiting)
        if frame is None:
            return None
        if self._faults.delay_s:
            self._queue.pause(self._faults.delay_s)
        payload = frame.payload if self._packer is None else self._packer.pack(frame)
        assert isinstance(payload, Tensor)
        number = self._faults.count()
        self._faults.spoil_before_checksum(number, payload)
        crc32 = checksum(payload) if self._config.has_checksums else None
        self._faults.spoil_after_checksum(number, payload)
        self._num_announced += 1
        ready = link_pb2.FrameReady(
            sequence=self._num_announced,
            reservation_id=frame.reservation_id,
            frame_index=frame.frame_index,
            num_bytes=frame.num_bytes,
            crc32=crc32,
        )
        self._channel.send(link_pb2.LinkNotice(frame_ready=ready), self._config.frame_timeout_s)
        return _Announced(frame, payload, self._num_announced)
