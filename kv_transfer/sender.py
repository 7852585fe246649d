"""The sending end of links: one per rank of a decode worker's life, made on first use."""

from kv_transfer.events import Post
from kv_transfer.faults import FrameFaults
from kv_transfer.link_device import LinkDevice
from kv_transfer.protocol import SampledAhead
from kv_transfer.sending_link import SenderIdentity, SendingLink
from kv_transfer.transport import LinkPeer, LinkStatus, OutgoingFrame
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import Incarnation, ReservationId

MAX_KNOWN_PEERS = 4096
MAX_HOST_LINKS = 64


class LinkPool:
    """A `FrameSender`; the least recently used idle link makes room for a new one.

    Called from one thread. A link that died is replaced on the next push, under the next epoch.
    """

    def __init__(
        self,
        *,
        me: SenderIdentity,
        config: HandoffConfig,
        post: Post,
        faults: FaultConfig | None = None,
        device: LinkDevice | None = None,
        max_links: int | None = None,
    ) -> None:
        """Starts without links.

        Args:
            me: this rank.
            config: time-outs, transports, limits.
            post: the engine's inbox.
            faults: injected on purpose.
            device: what its KV is on; None is a CPU.
            max_links: None takes what the settings allow on the device.
        """
        self._me = me
        self._config = config
        self._post = post
        self._faults = FrameFaults(faults or FaultConfig())
        self._device = device
        default = MAX_HOST_LINKS if device is None else config.max_device_links
        self._max_links = default if max_links is None else max_links
        self._links: dict[tuple[Incarnation, int], SendingLink] = {}
        """Least recently used first."""
        self._parting: list[SendingLink] = []
        self._epochs: dict[tuple[Incarnation, int], int] = {}

    def has_room(self, peer: Incarnation, rank: int = 0) -> bool:
        """Says whether a frame for this rank of a peer may be packed and pushed now."""
        link = self._links.get((peer, rank))
        return link is None or link.has_ended or link.has_room

    def open(self, peer: LinkPeer) -> None:
        """Begins to make the link, if there is none, so that the first frame need not wait."""
        key = (peer.incarnation, peer.rank)
        link = self._links.pop(key, None)
        if link is None or link.has_ended:
            if link is not None:
                self._parting.append(link)
            link = self._make_link(peer)
            link.start()
        self._links[key] = link

    def push(self, peer: LinkPeer, frame: OutgoingFrame) -> None:
        """Queues a frame; makes the link first if need be. Answered by FrameSent or LinkDown."""
        key = (peer.incarnation, peer.rank)
        link = self._links.pop(key, None)
        if link is None or not link.push(frame):
            if link is not None:
                self._parting.append(link)
            link = self._make_link(peer)
            link.push(frame)
            link.start()
        self._links[key] = link

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Tells rank 0 of a peer first tokens, if there is a link to it that can; else nothing."""
        link = self._links.get((peer, 0))
        if link is not None:
            link.tell(words)

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation, silently; one on the wire is sent to its end.

        Steps that the engine launches from now on may overwrite the reservation's blocks.
        """
        for link in (*self._parting, *self._links.values()):
            for mark in link.cancel(reservation_id):
                assert self._device is not None
                self._device.let_steps_wait_for(mark)

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        statuses = (link.status() for link in self._links.values())
        return tuple(status for status in statuses if status is not None)

    def close(self) -> None:
        """Says goodbye on every link and frees all threads, sockets and memory."""
        parting = [*self._parting, *self._links.values()]
        for link in parting:
            link.end("this worker closes", is_orderly=True)
        for link in parting:
            link.join(self._config.frame_timeout_s)
        self._links.clear()
        self._parting.clear()

    def _make_link(self, peer: LinkPeer) -> SendingLink:
        self._parting = [link for link in self._parting if link.is_running]
        self._make_room()
        key = (peer.incarnation, peer.rank)
        epoch = self._epochs.pop(key, 0) + 1
        self._epochs[key] = epoch
        if len(self._epochs) > MAX_KNOWN_PEERS:
            del self._epochs[next(iter(self._epochs))]
        return SendingLink(
            me=self._me,
            peer=peer,
            epoch=epoch,
            config=self._config,
            faults=self._faults,
            post=self._post,
            device=self._device,
        )

    def _make_room(self) -> None:
        """Parts from dead links, then from idle ones, the least recently used first."""
        for peer, link in list(self._links.items()):
            is_over = len(self._links) >= self._max_links
            if link.has_ended or (is_over and link.is_idle):
                link.end("made room for another link", is_orderly=True)
                self._parting.append(self._links.pop(peer))
