"""The receiving end of links: a listener, and one landing ring per link."""

import logging
import secrets
import socket
import threading
import time
from functools import partial

from torch import Tensor

from kv_transfer.events import FrameLanded, LinkEnds, LinkId, Post
from kv_transfer.expected_frames import ExpectationBook, ExpectedFrames
from kv_transfer.link_device import LinkDevice, Mark
from kv_transfer.notices import LinkBroken, NoticeChannel
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.receiving_link import ReceiverIdentity, ReceivingLink
from kv_transfer.sending_link import site_of
from kv_transfer.transport import LinkStatus
from kv_transfer.transport_choice import LinkSite, choose_transports, describe_mismatch
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId

logger = logging.getLogger(__name__)

MAX_PENDING_HANDSHAKES = 32
TOKEN_BYTES = 32
MAX_KNOWN_PEERS = 4096


class LinkListener:
    """A `FrameReceiver` that listens on one named address.

    `payload` and `release_slot` are called from one thread. Each link has a thread and a canary.
    """

    def __init__(
        self,
        *,
        host: str,
        incarnation: Incarnation,
        config: HandoffConfig,
        slot_bytes: int,
        post: Post,
        rank: int = 0,
        device: LinkDevice | None = None,
    ) -> None:
        """Binds a free port of `host` and listens.

        Args:
            host: the one address to listen on, and to bind links to.
            incarnation: of this worker.
            config: ring size and time-outs.
            slot_bytes: the largest frame (`link_memory.link_slot_bytes`).
            post: the engine's inbox.
            rank: of this process in its worker.
            device: what its KV is on; None is a CPU.
        """
        self._me = ReceiverIdentity(
            incarnation=incarnation, rank=rank, host=host, slot_bytes=slot_bytes
        )
        self._config = config
        self._post = post
        self._device = device
        self._expected = ExpectationBook(config.frame_timeout_s)
        self._room = threading.Condition()
        """Notified when a link has given memory on the GPU back."""
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._links: dict[LinkId, ReceivingLink] = {}
        self._epochs: dict[LinkEnds, int] = {}
        self._threads: set[threading.Thread] = set()
        self._num_handshakes = 0
        self._num_rejected = 0
        self._is_closed = False
        self._listener = socket.create_server((host, 0), backlog=64)
        self._port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="link-accept", daemon=True)
        self._acceptor.start()

    @property
    def num_rejected(self) -> int:
        """Connections that were closed because they did not say the right hello."""
        return self._num_rejected

    def endpoint(self) -> LinkEndpoint:
        """Returns where prefill ranks connect, and what they must say."""
        return LinkEndpoint(host=self._me.host, port=self._port, token=self._token)

    def expect(self, expected: ExpectedFrames) -> None:
        """Lets frames be written as they land, on a GPU."""
        if self._device is not None:
            self._expected.expect(expected)

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Ends that; nothing writes the reservation's blocks any more.

        Raises:
            TimeoutError: the device does not end what it writes.
            DeviceFault: it failed.
        """
        self._expected.withdraw(reservation_id)

    def payload(self, landed: FrameLanded) -> Tensor:
        """Returns the landed bytes, uint8 [num_bytes]; valid until `release_slot`."""
        with self._lock:
            link = self._links[landed.link]
        return link.payload(landed.slot, landed.num_bytes)

    def release_slot(self, landed: FrameLanded, after: Mark | None = None) -> None:
        """Gives a landing slot back to its link, once for each FrameLanded."""
        with self._lock:
            link = self._links[landed.link]
        link.release_slot(landed.slot, after)
        self._drop_if_spent(link)

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        with self._lock:
            links = list(self._links.values())
        statuses = (link.status() for link in links)
        return tuple(status for status in statuses if status is not None)

    def close(self) -> None:
        """Closes every link and the listening socket; may be repeated."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            links = list(self._links.values())
            threads = list(self._threads)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for link in links:
            link.end("this worker closes", is_orderly=True)
            link.abandon()
        for thread in threads:
            thread.join(self._config.frame_timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                is_welcome = self._num_handshakes < MAX_PENDING_HANDSHAKES and not self._is_closed
                if is_welcome:
                    self._num_handshakes += 1
                    thread = threading.Thread(
                        target=self._serve, args=(connection,), name="link-receive", daemon=True
                    )
                    self._threads.add(thread)
                    thread.start()
            if not is_welcome:
                self._num_rejected += 1
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Is one link's whole life."""
        channel = NoticeChannel(connection)
        link: ReceivingLink | None = None
        transports: tuple[str, ...] = ()
        try:
            link, transports = self._check_hello(channel)
        except LinkBroken as error:
            self._num_rejected += 1
            channel.close()
            logger.warning("link refused", extra={"detail": str(error)})
        finally:
            with self._lock:
                self._num_handshakes -= 1
        if link is not None:
            link.run(transports, partial(self._claim_room, link))
            self._drop_if_spent(link)
            with self._room:
                self._room.notify_all()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _check_hello(self, channel: NoticeChannel) -> tuple[ReceivingLink, tuple[str, ...]]:
        """Checks the peer's hello; returns its link, and what may carry it.

        Raises:
            LinkBroken: it is no peer of ours, or nothing can join us; nothing was answered.
        """
        hello = channel.expect("hello", self._config.connect_timeout_s).hello
        if not secrets.compare_digest(hello.token, self._token):
            raise LinkBroken("wrong token")
        mine = site_of(self._config, self._device)
        theirs = LinkSite(
            transports=tuple(hello.transports),
            host_id=hello.host_id,
            device_uuid=hello.device_uuid,
        )
        transports = choose_transports(mine, theirs)
        if not transports:
            raise LinkBroken(describe_mismatch(mine, theirs))
        link_id = LinkId(
            Incarnation(hello.prefill_incarnation), hello.epoch, hello.prefill_rank, self._me.rank
        )
        link = ReceivingLink(
            me=self._me,
            link_id=link_id,
            worker_id=WorkerId(hello.prefill_worker_id),
            channel=channel,
            config=self._config,
            post=self._post,
            expected=self._expected,
            device=self._device,
        )
        self._register(link)
        return link, transports

    def _claim_room(self, link: ReceivingLink) -> bool:
        """Makes room on the GPU for a link's ring, at the cost of the least recently used one."""
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        with self._room:
            while True:
                with self._lock:
                    others = [one for one in self._links.values() if one is not link]
                holders = [one for one in others if one.holds_device_memory]
                if len(holders) < self._config.max_device_links:
                    return True
                idle = [(since, one) for one in holders if (since := one.idle_since_s) is not None]
                if not idle:
                    return False
                oldest = min(idle, key=lambda pair: pair[0])[1]
                oldest.end("made room for another link", is_orderly=True)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._room.wait(left_s):
                    return False

    def _register(self, link: ReceivingLink) -> None:
        """Makes a link the peer rank's only one: a newer epoch ends what is left of an older."""
        ends, epoch = link.link_id.ends, link.link_id.epoch
        with self._lock:
            if self._is_closed:
                raise LinkBroken("this worker closes")
            if epoch <= self._epochs.get(ends, 0):
                raise LinkBroken(f"epoch {epoch} is not new")
            self._epochs.pop(ends, None)
            self._epochs[ends] = epoch
            if len(self._epochs) > MAX_KNOWN_PEERS:
                del self._epochs[next(iter(self._epochs))]
            older = [other for other in self._links.values() if other.link_id.ends == ends]
            self._links[link.link_id] = link
        for other in older:
            other.end("replaced by a newer link")

    def _drop_if_spent(self, link: ReceivingLink) -> None:
        if link.is_spent:
            with self._lock:
                self._links.pop(link.link_id, None)
