"""The receiving end of links: a listener, and one landing ring per link."""

import logging
import secrets
import socket
import threading

from torch import Tensor

from kv_transfer.events import FrameLanded, LinkEnds, LinkId, Post
from kv_transfer.links import TRANSPORT
from kv_transfer.notices import LinkBroken, NoticeChannel
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.receiving_link import ReceivingLink
from kv_transfer.transport import LinkStatus
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.v1 import link_pb2

logger = logging.getLogger(__name__)

MAX_PENDING_HANDSHAKES = 32
TOKEN_BYTES = 32
MAX_KNOWN_PEERS = 4096


class LinkListener:
    """A `FrameReceiver` over Gloo links, listening on one named address.

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
    ) -> None:
        """Binds a free port of `host` and listens.

        Args:
            host: the one address to listen on, and to bind links to.
            incarnation: of this worker.
            config: ring size and time-outs.
            slot_bytes: the largest frame (`plan.max_frame_bytes`).
            post: the engine's inbox.
            rank: of this process in its worker.
        """
        self._host = host
        self._incarnation = incarnation
        self._config = config
        self._slot_bytes = slot_bytes
        self._post = post
        self._rank = rank
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
        return LinkEndpoint(host=self._host, port=self._port, token=self._token)

    def payload(self, landed: FrameLanded) -> Tensor:
        """Returns the landed bytes, uint8 [num_bytes]; valid until `release_slot`."""
        with self._lock:
            link = self._links[landed.link]
        return link.payload(landed.slot, landed.num_bytes)

    def release_slot(self, landed: FrameLanded) -> None:
        """Gives a landing slot back to its link, once for each FrameLanded."""
        with self._lock:
            link = self._links[landed.link]
        link.release_slot(landed.slot)
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
        try:
            link = self._welcome(channel)
        except LinkBroken as error:
            self._num_rejected += 1
            channel.close()
            logger.warning("link refused", extra={"detail": str(error)})
            link = None
        finally:
            with self._lock:
                self._num_handshakes -= 1
        if link is not None:
            link.run(self._host)
            self._drop_if_spent(link)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _welcome(self, channel: NoticeChannel) -> ReceivingLink:
        """Checks the peer's hello and answers it.

        Raises:
            LinkBroken: it is no peer of ours; nothing was answered.
        """
        timeout_s = self._config.connect_timeout_s
        hello = channel.expect("hello", timeout_s).hello
        if not secrets.compare_digest(hello.token, self._token):
            raise LinkBroken("wrong token")
        link_id = LinkId(
            Incarnation(hello.prefill_incarnation), hello.epoch, hello.prefill_rank, self._rank
        )
        link = ReceivingLink(
            link_id=link_id,
            worker_id=WorkerId(hello.prefill_worker_id),
            channel=channel,
            config=self._config,
            slot_bytes=self._slot_bytes,
            post=self._post,
        )
        welcome = link_pb2.LinkWelcome(
            decode_incarnation=self._incarnation,
            decode_rank=self._rank,
            transport=TRANSPORT,
            slot_bytes=self._slot_bytes,
            num_slots=self._config.ring_slots,
        )
        channel.send(link_pb2.LinkNotice(welcome=welcome), timeout_s)
        self._register(link)
        return link

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
