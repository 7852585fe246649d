"""One link's sending end: a queue of frames, and the thread that makes the link and sends them."""

import logging
import socket
import threading
from dataclasses import dataclass

from kv_transfer.device_sender import DeviceSender
from kv_transfer.events import FrameSent, LinkDown, LinkId, Post
from kv_transfer.faults import FrameFaults
from kv_transfer.frame_queue import FrameQueue, LinkEnd
from kv_transfer.gloo_sender import GlooSender, HostPacker
from kv_transfer.link_device import DeviceFault, LinkDevice, Mark
from kv_transfer.links import PREFILL_MEMBER, Link
from kv_transfer.notices import LinkBroken, NoticeChannel, PeerSaidBye
from kv_transfer.outgoing_routes import NcclRoute, OutRoute, Packer, PushRoute
from kv_transfer.protocol import SampledAhead
from kv_transfer.transport import LinkPeer, LinkStatus, OutgoingFrame
from kv_transfer.transport_choice import GLOO, NCCL, PUSH, LinkSite
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId
from pdserve.rpc.v1 import link_pb2

logger = logging.getLogger(__name__)

CONNECTING = "connecting"
"""In place of a transport that is not chosen yet."""
MAX_FRAMES_IN_BLOCKS = 64
"""Frames of a GPU that wait in its blocks: they take no memory, and their engine may be busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderIdentity:
    """Who sends."""

    worker_id: WorkerId
    incarnation: Incarnation
    host: str
    """Local address of the links."""
    rank: int = 0


class SendingLink:
    """Sends frames to one life of a decode worker until it ends for good.

    `_run` and what it calls belong to the link's thread; the rest may be called from any thread.
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
        device: LinkDevice | None = None,
    ) -> None:
        """Starts with an empty queue; `start` connects. `device` is None on a CPU."""
        self.link_id = LinkId(peer.incarnation, epoch, peer.rank, me.rank)
        self._me = me
        self._peer = peer
        self._config = config
        self._faults = faults
        self._post = post
        self._device = device
        max_waiting = config.ring_slots if device is None else MAX_FRAMES_IN_BLOCKS
        self._queue = FrameQueue(max_waiting, self._wake)
        self._lock = threading.Lock()
        self._bytes_sent = 0
        self._transport = CONNECTING
        self._failures: tuple[str, ...] = ()
        self._channel: NoticeChannel | None = None
        self._sender: DeviceSender | None = None
        """Once it is there, the peer keeps its ring until the channel is closed."""
        self._thread = threading.Thread(target=self._run, name="link-send", daemon=True)

    @property
    def has_ended(self) -> bool:
        """True once it takes no more frames."""
        return self._queue.end is not None

    @property
    def is_idle(self) -> bool:
        """True when no frame is queued or under way."""
        return self._queue.is_idle

    @property
    def has_room(self) -> bool:
        """True when one more frame may be queued."""
        return self._queue.has_room

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
        """Queues a frame, and begins it if it can be; False when the link has ended meanwhile."""
        if not self._queue.push(frame):
            return False
        sender = self._sender
        # A delay is injected on the link's thread: this one is the engine's.
        if sender is not None and not self._faults.delay_s:
            try:
                sender.begin(1)
            except (LinkBroken, DeviceFault) as error:
                self.end(str(error))
        self._wake()
        return True

    def tell(self, words: SampledAhead) -> None:
        """Tells the peer words, unless it is on a host, where nothing is won by it."""
        sender = self._sender
        if sender is None:
            return
        self._queue.tell(words)
        try:
            # Here, and not on the link's thread: that one may sleep until a frame is through.
            sender.tell(is_patient=False)
        except LinkBroken as error:
            self.end(str(error))
        self._wake()

    def cancel(self, reservation_id: ReservationId) -> tuple[Mark, ...]:
        """Drops queued frames of a reservation; says what still reads its blocks."""
        return self._queue.cancel(reservation_id)

    def end(self, detail: str, *, is_orderly: bool = False) -> None:
        """Stops for good; the first reason given is reported, with what was not sent."""
        lost = self._queue.close(LinkEnd(detail=detail, is_orderly=is_orderly))
        if lost is None:
            return
        with self._lock:
            channel, sender = self._channel, self._sender
        if channel is not None and sender is None:
            channel.shut(may_still_send=is_orderly)
        if lost or not is_orderly:
            self._post(
                LinkDown(
                    link=self.link_id, worker_id=self._peer.worker_id, detail=detail, lost=lost
                )
            )

    def status(self) -> LinkStatus | None:
        """Returns its figures; None when it has ended."""
        if self._queue.end is not None:
            return None
        with self._lock:
            return LinkStatus(
                peer_worker_id=self._peer.worker_id,
                peer=self.link_id.peer,
                epoch=self.link_id.epoch,
                transport=self._transport,
                bytes_sent=self._bytes_sent,
                bytes_received=0,
                frames_in_flight=len(self._queue),
                failures=self._failures,
            )

    def _wake(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.wake()

    def _run(self) -> None:
        channel: NoticeChannel | None = None
        try:
            if self._device is not None:
                self._device.enter_thread()
            channel = self._connect_channel()
            self._say_hello(channel)
            self._serve(channel)
        except LinkBroken as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
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
        with self._lock:
            self._channel = channel
        if self._queue.end is not None:
            channel.shut()
        return channel

    def _say_hello(self, channel: NoticeChannel) -> None:
        site = site_of(self._config, self._device)
        hello = link_pb2.LinkHello(
            token=self._peer.endpoint.token,
            prefill_worker_id=self._me.worker_id,
            prefill_incarnation=self._me.incarnation,
            prefill_rank=self._me.rank,
            epoch=self.link_id.epoch,
            transports=site.transports,
            host_id=site.host_id,
            device_uuid=site.device_uuid,
        )
        channel.send(link_pb2.LinkNotice(hello=hello), self._config.connect_timeout_s)

    def _serve(self, channel: NoticeChannel) -> None:
        """Takes the peer's choices until one comes up, then sends over it."""
        while True:
            # The peer may make room for this link, or wait for a communicator that failed there.
            timeout_s = 2 * self._config.connect_timeout_s
            welcome = channel.expect("welcome", timeout_s).welcome
            self._check_welcome(welcome)
            with self._lock:
                self._transport = welcome.transport
                self._failures = tuple(welcome.failures)
            if welcome.transport == GLOO:
                self._serve_gloo(channel)
                return
            route = self._prepare(channel, welcome)
            if route is not None:
                self._log_made(welcome)
                self._serve_route(channel, route)
                return

    def _check_welcome(self, welcome: link_pb2.LinkWelcome) -> None:
        if welcome.decode_incarnation != self._peer.incarnation:
            raise LinkBroken("another incarnation listens there")
        if welcome.decode_rank != self._peer.rank:
            raise LinkBroken(f"rank {welcome.decode_rank} listens there, not {self._peer.rank}")
        allowed = site_of(self._config, self._device).transports
        if welcome.transport not in allowed:
            raise LinkBroken(f"the peer speaks {welcome.transport!r}, not {', '.join(allowed)}")
        if welcome.transport != GLOO and not (welcome.num_slots and welcome.slot_bytes):
            raise LinkBroken("the peer has no landing slots")

    def _prepare(self, channel: NoticeChannel, welcome: link_pb2.LinkWelcome) -> OutRoute | None:
        """Makes this end of a route, and hears of the other; None where one of them failed."""
        route: OutRoute | None = None
        failure = ""
        try:
            route = self._make_route(welcome)
        except DeviceFault as error:
            failure = str(error) or "unknown"
        timeout_s = self._config.connect_timeout_s
        prepared = link_pb2.LinkPrepared(failure=failure)
        try:
            channel.send(link_pb2.LinkNotice(prepared=prepared), timeout_s)
            theirs = channel.expect("prepared", 2 * timeout_s).prepared.failure
        except LinkBroken:
            if route is not None:
                route.abort()
                route.close()
            raise
        if route is None or not theirs:
            return route
        route.abort()
        route.close()
        return None

    def _make_route(self, welcome: link_pb2.LinkWelcome) -> OutRoute:
        assert self._device is not None
        num_bytes = welcome.num_slots * welcome.slot_bytes
        if welcome.transport == PUSH:
            ring = self._device.open_memory(welcome.ring_handle, num_bytes)
            return PushRoute(self._device, ring, welcome.num_slots)
        assert welcome.transport == NCCL
        end = self._device.join_nccl(
            welcome.nccl_id,
            PREFILL_MEMBER,
            self._config.connect_timeout_s,
            lambda: self._queue.end is not None,
        )
        try:
            return NcclRoute(self._device, end, welcome.num_slots, welcome.slot_bytes)
        except DeviceFault:
            end.abort()
            raise

    def _log_made(self, welcome: link_pb2.LinkWelcome) -> None:
        log = logger.warning if welcome.failures else logger.info
        log(
            "link made",
            extra={
                "peer_worker_id": self._peer.worker_id,
                "transport": welcome.transport,
                "failures": list(welcome.failures),
            },
        )

    def _serve_gloo(self, channel: NoticeChannel) -> None:
        link = Link.connect(channel, PREFILL_MEMBER, self._me.host, self._config.connect_timeout_s)
        try:
            link.watch(self._on_canary)
            packer = None
            if self._device is not None:
                packer = HostPacker(self._device, self._queue, self._config.frame_timeout_s)
            GlooSender(
                link=link,
                packer=packer,
                queue=self._queue,
                channel=channel,
                config=self._config,
                faults=self._faults,
                note_sent=self._note_sent,
            ).run()
        except (LinkBroken, DeviceFault) as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            end = self._queue.end
            if end is not None and end.is_orderly:
                link.say_goodbye(channel)
            link.destroy()

    def _on_canary(self, detail: str | None) -> None:
        if detail is None:
            self.end("the peer said goodbye", is_orderly=True)
        else:
            self.end(f"peer lost: {detail}")

    def _serve_route(self, channel: NoticeChannel, route: OutRoute) -> None:
        sender = DeviceSender(
            route=route,
            packer=Packer(self._faults, has_checksums=self._config.has_checksums),
            queue=self._queue,
            channel=channel,
            timeout_s=self._config.frame_timeout_s,
            note_sent=self._note_sent,
        )
        with self._lock:
            self._sender = sender
        try:
            sender.run()
        except PeerSaidBye:
            self.end("the peer said goodbye", is_orderly=True)
        except (LinkBroken, DeviceFault) as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            self._leave(channel, route, sender)

    def _leave(self, channel: NoticeChannel, route: OutRoute, sender: DeviceSender) -> None:
        """Says goodbye, and gives memory back once nothing uses it."""
        end = self._queue.end
        assert end is not None
        sender.say_goodbye("" if end.is_orderly else end.detail)
        route.abort()
        try:
            is_settled = sender.settle()
        except DeviceFault:
            is_settled = False
        if is_settled:
            route.close()
        else:
            # It stays mapped: freed memory that the device still writes would be worse.
            logger.error("link memory is lost", extra={"peer_worker_id": self._peer.worker_id})

    def _note_sent(self, frame: OutgoingFrame, on_link_s: float | None = None) -> None:
        if not self._queue.finish(frame):
            return  # it was reported as lost
        with self._lock:
            self._bytes_sent += frame.num_bytes
        self._post(
            FrameSent(
                link=self.link_id,
                reservation_id=frame.reservation_id,
                frame_index=frame.frame_index,
                on_link_s=on_link_s,
            )
        )


def site_of(config: HandoffConfig, device: LinkDevice | None) -> LinkSite:
    """Returns where this end keeps its KV, and what it may use."""
    if device is None:
        return LinkSite(transports=tuple(one for one in config.transports if one == GLOO))
    return LinkSite(transports=config.transports, host_id=device.host_id, device_uuid=device.uuid)
