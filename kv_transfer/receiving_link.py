"""One link's receiving end: its landing ring, and the thread that fills it."""

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.events import FrameLanded, LinkDown, LinkId, Post
from kv_transfer.links import DECODE_MEMBER, TRANSPORT, Link, checksum
from kv_transfer.notices import LinkBroken, NoticeChannel
from kv_transfer.transport import LinkStatus
from pdserve.config.worker import HandoffConfig
from pdserve.request import ReservationId, WorkerId
from pdserve.rpc.v1 import link_pb2


@dataclass(frozen=True, slots=True)
class _Arrived:
    ready: link_pb2.FrameReady
    slot: int


class ReceivingLink:
    """Receives frames of one prefill worker's life into slots that only this link writes.

    `run` belongs to the link's thread; the rest may be called from any thread. The ring outlives
    the link until every landed slot was released.
    """

    def __init__(
        self,
        *,
        link_id: LinkId,
        worker_id: WorkerId,
        channel: NoticeChannel,
        config: HandoffConfig,
        slot_bytes: int,
        post: Post,
    ) -> None:
        """Takes the channel over, after the peer's hello was checked and welcomed."""
        self.link_id = link_id
        self._worker_id = worker_id
        self._channel = channel
        self._config = config
        self._slot_bytes = slot_bytes
        self._post = post
        self._ring = torch.empty((config.ring_slots, slot_bytes), dtype=torch.uint8)
        self._free = deque(range(config.ring_slots))
        self._landed: set[int] = set()
        self._num_posted = 0
        self._bytes_received = 0
        self._condition = threading.Condition()
        self._end: str | None = None
        """Why the link ended; None while it lives."""
        self._is_orderly = False

    @property
    def is_spent(self) -> bool:
        """True when the link has ended and no landed slot is in use."""
        with self._condition:
            return self._end is not None and not self._landed

    def run(self, host: str) -> None:
        """Receives until the link ends, then frees its sockets and threads."""
        link: Link | None = None
        try:
            link = Link.connect(self._channel, DECODE_MEMBER, host, self._config.connect_timeout_s)
            link.watch(self._on_canary)
            self._receive_frames(link)
        except LinkBroken as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            if link is not None:
                if self._is_orderly:
                    link.say_goodbye(self._channel)
                link.destroy()
            self._channel.close()

    def end(self, detail: str, *, is_orderly: bool = False) -> None:
        """Makes `run` return soon; the first reason given is the one reported."""
        with self._condition:
            if self._end is not None:
                return
            self._end = detail
            self._is_orderly = is_orderly
            self._condition.notify_all()
        self._channel.shut(may_still_send=is_orderly)
        if not is_orderly:
            # At once: `run` itself may hang in a begun transfer until the frame's time-out.
            self._post(LinkDown(link=self.link_id, worker_id=self._worker_id, detail=detail))

    def payload(self, slot: int, num_bytes: int) -> Tensor:
        """Returns a landed frame's bytes, valid until its slot is released."""
        assert slot in self._landed
        return self._ring[slot, :num_bytes]

    def release_slot(self, slot: int) -> None:
        """Lets the next frame land in a slot."""
        with self._condition:
            self._landed.remove(slot)
            self._free.append(slot)
            self._condition.notify_all()

    def status(self) -> LinkStatus | None:
        """Returns its figures; None when it has ended."""
        with self._condition:
            if self._end is not None:
                return None
            return LinkStatus(
                peer_worker_id=self._worker_id,
                peer=self.link_id.peer,
                epoch=self.link_id.epoch,
                transport=TRANSPORT,
                bytes_sent=0,
                bytes_received=self._bytes_received,
                frames_in_flight=self._num_posted + len(self._landed),
            )

    def _on_canary(self, detail: str | None) -> None:
        if detail is None:
            self.end("the peer said goodbye", is_orderly=True)
        else:
            self.end(f"peer lost: {detail}")

    def _receive_frames(self, link: Link) -> None:
        """Receives a frame, posts the next one's slot if it is announced, then checks the first."""
        arrived: _Arrived | None = None
        try:
            while True:
                notice = self._channel.receive(None if arrived is None else 0.0)
                if notice is None:
                    self._deliver(arrived)
                    arrived = None
                    continue
                if notice.WhichOneof("notice") == "bye":
                    self.end("the peer said goodbye", is_orderly=True)
                    return
                if notice.WhichOneof("notice") != "frame_ready":
                    raise LinkBroken(f"{notice.WhichOneof('notice')} came instead of frame_ready")
                ready = notice.frame_ready
                if not 0 < ready.num_bytes <= self._slot_bytes:
                    raise LinkBroken(f"a frame of {ready.num_bytes} bytes for {self._slot_bytes}")
                if not self._free:
                    self._deliver(arrived)
                    arrived = None
                slot = self._take_slot()
                work = link.post_receive(self._ring[slot, : ready.num_bytes])
                posted = link_pb2.FramePosted(sequence=ready.sequence)
                self._channel.send(
                    link_pb2.LinkNotice(frame_posted=posted), self._config.frame_timeout_s
                )
                self._deliver(arrived)
                arrived = None
                link.wait(work, self._config.frame_timeout_s)
                arrived = _Arrived(ready, slot)
        finally:
            # A frame that came whole is good, whatever befell the link after it.
            self._deliver(arrived)

    def _take_slot(self) -> int:
        with self._condition:
            has_slot = self._condition.wait_for(
                lambda: self._free or self._end is not None, self._config.frame_timeout_s
            )
            if self._end is not None:
                raise LinkBroken(self._end)
            if not has_slot:
                raise LinkBroken("no landing slot was released in time")
            self._num_posted += 1
            return self._free.popleft()

    def _deliver(self, arrived: _Arrived | None) -> None:
        if arrived is None:
            return
        ready, slot = arrived.ready, arrived.slot
        is_intact = True
        if ready.HasField("crc32"):
            is_intact = checksum(self._ring[slot, : ready.num_bytes]) == ready.crc32
        with self._condition:
            self._num_posted -= 1
            self._landed.add(slot)
            self._bytes_received += ready.num_bytes
        self._post(
            FrameLanded(
                link=self.link_id,
                reservation_id=ReservationId(ready.reservation_id),
                frame_index=ready.frame_index,
                num_bytes=ready.num_bytes,
                slot=slot,
                is_intact=is_intact,
            )
        )
