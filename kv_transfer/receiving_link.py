"""One link's receiving end: the choice of a transport, a landing ring, and what fills it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.arrivals import Arrivals
from kv_transfer.device_receiver import DeviceReceiver
from kv_transfer.events import LinkDown, LinkId, Post
from kv_transfer.expected_frames import ExpectationBook
from kv_transfer.gloo_receiver import GlooReceiver
from kv_transfer.incoming_routes import GrantingRing, InRoute, NcclIn, PushIn
from kv_transfer.landing_ring import LandingRing
from kv_transfer.link_device import DeviceFault, LinkDevice, Mark, OwnMemory
from kv_transfer.links import DECODE_MEMBER, Link
from kv_transfer.notices import LinkBroken, NoticeChannel, PeerSaidBye
from kv_transfer.sending_link import CONNECTING
from kv_transfer.transport import LinkStatus
from kv_transfer.transport_choice import GLOO, NCCL, PUSH
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.v1 import link_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverIdentity:
    """Who receives."""

    incarnation: Incarnation
    rank: int
    host: str
    """Local address of the links."""
    slot_bytes: int
    """The largest frame."""


class ReceivingLink:
    """Receives frames of one prefill worker's life into slots that only this link's peer writes.

    `run` belongs to the link's thread; the rest may be called from any thread. The ring outlives
    the link until every landed slot was released, and, where the peer writes it by itself, until
    the peer has let go.
    """

    def __init__(  # noqa: PLR0913 - where the parts meet
        self,
        *,
        me: ReceiverIdentity,
        link_id: LinkId,
        worker_id: WorkerId,
        channel: NoticeChannel,
        config: HandoffConfig,
        post: Post,
        expected: ExpectationBook,
        device: LinkDevice | None = None,
    ) -> None:
        """Takes the channel over, after the peer's hello was checked; `device`: None on a CPU."""
        self.link_id = link_id
        self._me = me
        self._worker_id = worker_id
        self._channel = channel
        self._config = config
        self._post = post
        self._arrivals = Arrivals(link_id, me.rank, expected, post)
        self._device = device
        self._ring: LandingRing | None = None
        self._memory: OwnMemory | None = None
        self._transport = CONNECTING
        self._failures: list[str] = []
        self._num_on_their_way: Callable[[], int] = int
        self._lock = threading.Lock()
        self._end: str | None = None
        """Why the link ended; None while it lives."""
        self._is_orderly = False
        self._is_abandoned = False

    @property
    def has_ended(self) -> bool:
        """True once it takes no more frames."""
        return self._end is not None

    @property
    def is_spent(self) -> bool:
        """True when the link has ended, no landed slot is in use, and its GPU memory is free."""
        is_over = self._end is not None and self._memory is None
        return is_over and (self._ring is None or self._ring.num_landed == 0)

    @property
    def holds_device_memory(self) -> bool:
        """True while a ring of it is on the GPU."""
        return self._memory is not None

    @property
    def idle_since_s(self) -> float | None:
        """When its last frame landed; None while frames are on their way, or landed and in use."""
        is_idle = self._ring is not None and self._ring.is_quiet and not self._num_on_their_way()
        return self._arrivals.last_at_s if is_idle else None

    def run(self, transports: tuple[str, ...], claim_room: Callable[[], bool]) -> None:
        """Offers the transports in turn, receives until the link ends, then frees everything.

        Args:
            transports: what both ends may use, the preferred first.
            claim_room: asked before memory on the GPU is taken for this link.
        """
        try:
            if self._device is not None:
                self._device.enter_thread()
            self._serve(transports, claim_room)
        except LinkBroken as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            self._channel.close()

    def end(self, detail: str, *, is_orderly: bool = False) -> None:
        """Makes `run` return soon; the first reason given is the one reported."""
        with self._lock:
            if self._end is not None:
                return
            self._end = detail
            self._is_orderly = is_orderly
        if self._ring is not None:
            self._ring.notify()
        if self._memory is None:
            self._channel.shut(may_still_send=is_orderly)
        self._channel.wake()
        if not is_orderly:
            # At once: `run` itself may hang in a begun transfer until the frame's time-out.
            self._post(LinkDown(link=self.link_id, worker_id=self._worker_id, detail=detail))

    def abandon(self) -> None:
        """Lets `run` leave memory that is still in use: this process ends."""
        self._is_abandoned = True
        self._channel.wake()

    def payload(self, slot: int, num_bytes: int) -> Tensor:
        """Returns a landed frame's bytes, valid until its slot is released."""
        assert self._ring is not None
        return self._ring.payload(slot, num_bytes)

    def release_slot(self, slot: int, after: Mark | None) -> None:
        """Lets the next frame land in a slot."""
        assert self._ring is not None
        self._ring.release(slot, after)

    def status(self) -> LinkStatus | None:
        """Returns its figures; None when it has ended."""
        if self._end is not None:
            return None
        num_landed = 0 if self._ring is None else self._ring.num_landed
        return LinkStatus(
            peer_worker_id=self._worker_id,
            peer=self.link_id.peer,
            epoch=self.link_id.epoch,
            transport=self._transport,
            bytes_sent=0,
            bytes_received=self._arrivals.num_bytes,
            frames_in_flight=self._num_on_their_way() + num_landed,
            failures=tuple(self._failures),
        )

    def _serve(self, transports: tuple[str, ...], claim_room: Callable[[], bool]) -> None:
        for transport in transports:
            self._transport = transport
            if transport == GLOO:
                self._serve_gloo()
                return
            try:
                route = self._prepare(transport, claim_room)
            except DeviceFault as error:
                self._failures.append(f"{transport}: {error}")
                logger.warning(
                    "transport did not come up",
                    extra={
                        "peer_worker_id": self._worker_id,
                        "transport": transport,
                        "detail": str(error),
                    },
                )
                continue
            self._serve_route(route)
            return
        raise LinkBroken(f"no transport is left: {'; '.join(self._failures)}")

    def _welcome(self, *, ring_handle: bytes = b"", nccl_id: bytes = b"") -> None:
        welcome = link_pb2.LinkWelcome(
            decode_incarnation=self._me.incarnation,
            decode_rank=self._me.rank,
            transport=self._transport,
            slot_bytes=self._me.slot_bytes,
            num_slots=self._config.ring_slots,
            ring_handle=ring_handle,
            nccl_id=nccl_id,
            failures=self._failures,
        )
        self._channel.send(link_pb2.LinkNotice(welcome=welcome), self._config.connect_timeout_s)

    def _serve_gloo(self) -> None:
        num_slots, slot_bytes = self._config.ring_slots, self._me.slot_bytes
        if self._device is None:
            memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8)
        else:
            memory = self._device.make_host_frame(num_slots * slot_bytes)
        self._ring = ring = LandingRing(memory, num_slots, self._channel.wake)
        self._welcome()
        timeout_s = self._config.connect_timeout_s
        link = Link.connect(self._channel, DECODE_MEMBER, self._me.host, timeout_s)
        try:
            link.watch(self._on_canary)
            receiver = GlooReceiver(
                link=link,
                ring=ring,
                channel=self._channel,
                timeout_s=self._config.frame_timeout_s,
                has_ended=lambda: self.has_ended,
                arrivals=self._arrivals,
            )
            self._num_on_their_way = lambda: receiver.num_announced
            receiver.run()
        except PeerSaidBye:
            self.end("the peer said goodbye", is_orderly=True)
        except LinkBroken as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            if self._is_orderly:
                link.say_goodbye(self._channel)
            link.destroy()

    def _on_canary(self, detail: str | None) -> None:
        if detail is None:
            self.end("the peer said goodbye", is_orderly=True)
        else:
            self.end(f"peer lost: {detail}")

    def _prepare(self, transport: str, claim_room: Callable[[], bool]) -> InRoute:
        """Makes this end of a route, and hears of the other.

        Raises:
            DeviceFault: one of them failed; nothing is left of it.
            LinkBroken: the peer is gone.
        """
        assert self._device is not None
        if not claim_room():
            raise DeviceFault(f"all {self._config.max_device_links} links on the GPU are in use")
        num_slots = self._config.ring_slots
        self._memory = self._device.make_memory(num_slots * self._me.slot_bytes)
        route: InRoute | None = None
        try:
            self._ring = LandingRing(self._memory.tensor, num_slots, self._channel.wake)
            route = self._make_route(transport, self._ring)
            failure = self._exchange("")
            if failure:
                raise DeviceFault(f"at the prefill rank: {failure}")
        except (DeviceFault, LinkBroken):
            if route is not None:
                route.abort()
            self._ring = None
            memory, self._memory = self._memory, None
            memory.close()
            raise
        return route

    def _make_route(self, transport: str, ring: LandingRing) -> InRoute:
        """Tells the peer what it needs for its end, and makes this one."""
        assert self._device is not None
        assert self._memory is not None
        granting = GrantingRing(ring, self._channel, self._config.frame_timeout_s)
        if transport == PUSH:
            self._welcome(ring_handle=self._memory.handle)
            return PushIn(granting)
        assert transport == NCCL
        nccl_id = self._device.make_nccl_id()
        self._welcome(nccl_id=nccl_id)
        try:
            end = self._device.join_nccl(
                nccl_id, DECODE_MEMBER, self._config.connect_timeout_s, lambda: self.has_ended
            )
        except DeviceFault as error:
            self._exchange(str(error) or "unknown")
            raise
        return NcclIn(granting, ring, self._device, end)

    def _exchange(self, failure: str) -> str:
        """Tells the peer how this end's preparation went; returns how the peer's did."""
        timeout_s = self._config.connect_timeout_s
        prepared = link_pb2.LinkPrepared(failure=failure)
        self._channel.send(link_pb2.LinkNotice(prepared=prepared), timeout_s)
        return self._channel.expect("prepared", 2 * timeout_s).prepared.failure

    def _serve_route(self, route: InRoute) -> None:
        assert self._device is not None
        assert self._ring is not None
        logger.info(
            "link made",
            extra={"peer_worker_id": self._worker_id, "transport": route.transport},
        )
        receiver = DeviceReceiver(
            route=route,
            ring=self._ring,
            device=self._device,
            channel=self._channel,
            timeout_s=self._config.frame_timeout_s,
            has_ended=lambda: self.has_ended,
            arrivals=self._arrivals,
        )
        self._num_on_their_way = lambda: receiver.num_announced
        try:
            receiver.run()
        except PeerSaidBye:
            self.end("the peer said goodbye", is_orderly=True)
        except (LinkBroken, DeviceFault) as error:
            self.end(str(error))
        finally:
            self.end("the link's thread failed")
            self._leave(route, receiver)

    def _leave(self, route: InRoute, receiver: DeviceReceiver) -> None:
        """Says goodbye, and frees the ring once nobody can touch it any more."""
        if self._is_orderly:
            self._channel.say_goodbye()
        self._channel.shut_sending()
        route.abort()
        self._num_on_their_way = int
        try:
            is_settled = receiver.settle()
        except DeviceFault:
            is_settled = False
        if route.waits_for_peer:
            # Frozen, it may write as long as it lives; its death closes the socket.
            self._channel.wait_until_closed(lambda: self._is_abandoned)
        is_settled = self._wait_until_quiet() and is_settled
        memory, self._memory = self._memory, None
        if memory is not None and is_settled and not self._is_abandoned:
            memory.close()

    def _wait_until_quiet(self) -> bool:
        """Waits until the engine has released every landed slot; False where the device failed."""
        assert self._ring is not None
        try:
            while not self._ring.is_quiet and not self._is_abandoned:
                if not self._ring.reclaim():
                    self._channel.wait_for_wake(0.005 if self._ring.is_draining else None)
        except DeviceFault:
            return False
        return True
