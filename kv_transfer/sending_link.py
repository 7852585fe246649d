"""One link's sending end: a bounded queue of frames, and the thread that sends them."""

import socket
import threading
from collections import deque
from dataclasses import dataclass

from torch.distributed import Work

from kv_transfer.events import FrameSent, LinkDown, LinkId, Post
from kv_transfer.faults import FrameFaults
from kv_transfer.links import PREFILL_MEMBER, TRANSPORT, Link, checksum
from kv_transfer.notices import LinkBroken, NoticeChannel
from kv_transfer.transport import LinkPeer, LinkStatus, OutgoingFrame
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId
from pdserve.rpc.v1 import link_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderIdentity:
    """Who sends."""

    worker_id: WorkerId
    incarnation: Incarnation
    host: str
    """Local address of the links."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class _Announced:
    frame: OutgoingFrame
    sequence: int


class SendingLink:
    """Sends frames to one life of a decode worker, one after another, until it ends for good.

    `run` belongs to the link's thread; the rest may be called from any thread.
    """

    def __init__(
        self,
        *,
        me: SenderIdentity,
        peer: LinkPeer,
        epoch: int,
        config: HandoffConfig,
        faults: FrameFaults,
        post: Post,
    ) -> None:
        """Starts with an empty queue; `start` connects."""
        self.link_id = LinkId(peer.incarnation, epoch, peer.rank, me.rank)
        self._me = me
        self._peer = peer
        self._config = config
        self._faults = faults
        self._post = post
        self._queue: deque[OutgoingFrame] = deque()
        self._under_way: list[OutgoingFrame] = []
        """Frames that were announced and are not through."""
        self._num_announced = 0
        self._bytes_sent = 0
        self._condition = threading.Condition()
        self._end: str | None = None
        self._is_orderly = False
        self._channel: NoticeChannel | None = None
        self._thread = threading.Thread(target=self._run, name="link-send", daemon=True)

    @property
    def has_ended(self) -> bool:
        """True once it takes no more frames."""
        with self._condition:
            return self._end is not None

    @property
    def is_idle(self) -> bool:
        """True when no frame is queued or under way."""
        with self._condition:
            return not self._queue and not self._under_way

    @property
    def has_room(self) -> bool:
        """True when one more frame may be queued."""
        with self._condition:
            return len(self._queue) < self._config.ring_slots

    @property
    def is_running(self) -> bool:
        """True while its thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Connects and sends in the background."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its thread, after `end`."""
        self._thread.join(timeout_s)

    def push(self, frame: OutgoingFrame) -> bool:
        """Queues a frame; False when the link has ended meanwhile."""
        with self._condition:
            if self._end is not None:
                return False
            self._queue.append(frame)
            self._condition.notify_all()
            return True

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation; an announced one is sent to its end."""
        with self._condition:
            kept = [frame for frame in self._queue if frame.reservation_id != reservation_id]
            self._queue = deque(kept)

    def end(self, detail: str, *, is_orderly: bool = False) -> None:
        """Stops for good; the first reason given is reported, with what was not sent."""
        with self._condition:
            if self._end is not None:
                return
            self._end = detail
            self._is_orderly = is_orderly
            lost = frozenset(frame.reservation_id for frame in (*self._queue, *self._under_way))
            self._queue.clear()
            self._condition.notify_all()
            channel = self._channel
        if channel is not None:
            channel.shut(may_still_send=is_orderly)
        if lost or not is_orderly:
            self._post(
                LinkDown(
                    link=self.link_id, worker_id=self._peer.worker_id, detail=detail, lost=lost
                )
            )

    def status(self) -> LinkStatus | None:
        """Returns its figures; None when it has ended."""
        with self._condition:
            if self._end is not None:
                return None
            return LinkStatus(
                peer_worker_id=self._peer.worker_id,
                peer=self.link_id.peer,
                epoch=self.link_id.epoch,
                transport=TRANSPORT,
                bytes_sent=self._bytes_sent,
                bytes_received=0,
                frames_in_flight=len(self._queue) + len(self._under_way),
            )

    def _run(self) -> None:
        link: Link | None = None
        channel: NoticeChannel | None = None
        try:
            channel = self._connect_channel()
            self._say_hello(channel)
            link = Link.connect(
                channel, PREFILL_MEMBER, self._me.host, self._config.connect_timeout_s
            )
            link.watch(self._on_canary)
            self._send_frames(channel, link)
        except LinkBroken as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            if link is not None and channel is not None:
                if self._is_orderly:
                    link.say_goodbye(channel)
                link.destroy()
            if channel is not None:
                channel.close()

    def _connect_channel(self) -> NoticeChannel:
        endpoint = self._peer.endpoint
        try:
            connection = socket.create_connection(
                (endpoint.host, endpoint.port), self._config.connect_timeout_s
            )
        except OSError as error:
            raise LinkBroken(f"cannot connect: {error}") from error
        channel = NoticeChannel(connection)
        with self._condition:
            self._channel = channel
            if self._end is not None:
                channel.shut()
        return channel

    def _say_hello(self, channel: NoticeChannel) -> None:
        timeout_s = self._config.connect_timeout_s
        hello = link_pb2.LinkHello(
            token=self._peer.endpoint.token,
            prefill_worker_id=self._me.worker_id,
            prefill_incarnation=self._me.incarnation,
            prefill_rank=self._me.rank,
            epoch=self.link_id.epoch,
        )
        channel.send(link_pb2.LinkNotice(hello=hello), timeout_s)
        welcome = channel.expect("welcome", timeout_s).welcome
        if welcome.decode_incarnation != self._peer.incarnation:
            raise LinkBroken("another incarnation listens there")
        if welcome.decode_rank != self._peer.rank:
            raise LinkBroken(f"rank {welcome.decode_rank} listens there, not {self._peer.rank}")
        if welcome.transport != TRANSPORT:
            raise LinkBroken(f"the peer speaks {welcome.transport!r}, not {TRANSPORT!r}")

    def _on_canary(self, detail: str | None) -> None:
        if detail is None:
            self.end("the peer said goodbye", is_orderly=True)
        else:
            self.end(f"peer lost: {detail}")

    def _send_frames(self, channel: NoticeChannel, link: Link) -> None:
        """Sends one frame; while it travels, checksums and announces the next."""
        timeout_s = self._config.frame_timeout_s
        announced: _Announced | None = None
        while True:
            if announced is None:
                announced = self._announce(channel, is_waiting=True)
            if announced is None:
                return
            posted = channel.expect("frame_posted", timeout_s).frame_posted
            if posted.sequence != announced.sequence:
                raise LinkBroken("the wrong frame was posted")
            work: Work = link.send(announced.frame.payload)
            following = self._announce(channel, is_waiting=False)
            link.wait(work, timeout_s)
            self._note_sent(announced.frame)
            announced = following

    def _announce(self, channel: NoticeChannel, *, is_waiting: bool) -> _Announced | None:
        """Takes the next frame and announces it; None: the queue is empty, or the link ends."""
        with self._condition:
            if is_waiting:
                self._condition.wait_for(lambda: self._queue or self._end is not None)
            if self._end is not None or not self._queue:
                return None
            frame = self._queue.popleft()
            self._under_way.append(frame)
            if self._faults.delay_s:
                self._condition.wait_for(lambda: self._end is not None, self._faults.delay_s)
        number = self._faults.count()
        self._faults.spoil_before_checksum(number, frame.payload)
        crc32 = checksum(frame.payload) if self._config.has_checksums else None
        self._faults.spoil_after_checksum(number, frame.payload)
        self._num_announced += 1
        ready = link_pb2.FrameReady(
            sequence=self._num_announced,
            reservation_id=frame.reservation_id,
            frame_index=frame.frame_index,
            num_bytes=frame.payload.numel(),
            crc32=crc32,
        )
        channel.send(link_pb2.LinkNotice(frame_ready=ready), self._config.frame_timeout_s)
        return _Announced(frame, self._num_announced)

    def _note_sent(self, frame: OutgoingFrame) -> None:
        with self._condition:
            if self._end is not None:
                return  # it was reported as lost
            self._under_way.remove(frame)
            self._bytes_sent += frame.payload.numel()
        self._post(
            FrameSent(
                link=self.link_id,
                reservation_id=frame.reservation_id,
                frame_index=frame.frame_index,
            )
        )
