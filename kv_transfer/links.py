"""A two-member Gloo group built directly, without a server, that notices its peer's death.

What Gloo does (torch 2.13, measured): when a peer dies in mid-transfer, only operations that have
not begun are woken; a begun one hangs until its own time-out. So each end keeps one extra receive
posted, the *canary*: it fails within 0.3 s of the peer's death, and completes when the peer says
goodbye. Every other wait has a short time-out. A wait that times out closes the pair for good,
which also wakes the canary: that is how `Link.destroy` ends one on purpose.
"""

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo, Work

from kv_transfer.notices import GOODBYE_TIMEOUT_S, LinkBroken, NoticeChannel
from pdserve.rpc.v1 import link_pb2

PREFILL_MEMBER = 0
DECODE_MEMBER = 1
_FRAME_TAG = 1
_POISON_TAG = 2
_CANARY_TAG = 3
_MAX_KEY_BYTES = 1024
_FOREVER = timedelta(days=365)


class _Group(Protocol):
    """What torch's stubs leave out of a process group."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


class Link:
    """One end of a live group. `send`, `post_receive` and `wait` belong to one thread."""

    def __init__(self, group: _Group, member: int) -> None:
        """Takes over a connected group; see `connect`."""
        self._group = group
        self._peer = 1 - member
        self._is_destroyed = threading.Event()
        self._canary: threading.Thread | None = None

    @classmethod
    def connect(cls, channel: NoticeChannel, member: int, host: str, timeout_s: float) -> "Link":
        """Builds the group; both ends call it at the same time.

        Each end has a store of its own; the one key that the other end needs travels as a notice.

        Raises:
            LinkBroken: the peer is gone, too slow, or sends nonsense.
        """
        store = HashStore()
        built: list[_Group] = []
        faults: list[Exception] = []

        def build() -> None:
            try:
                built.append(_make_group(store, member, host, timeout_s))
            except Exception as error:  # noqa: BLE001 - Gloo raises many types on a bad key
                faults.append(error)

        builder = threading.Thread(target=build, name="link-build", daemon=True)
        builder.start()
        mine, theirs = f"0/{member}", f"0/{1 - member}"
        try:
            store.wait([mine], timedelta(seconds=timeout_s))
            notice = link_pb2.RendezvousKey(key=mine, value=store.get(mine))
            channel.send(link_pb2.LinkNotice(rendezvous_key=notice), timeout_s)
            answer = channel.expect("rendezvous_key", timeout_s).rendezvous_key
            if answer.key != theirs or len(answer.value) > _MAX_KEY_BYTES:
                raise LinkBroken("an odd rendezvous key")
            store.set(theirs, answer.value)  # type: ignore[arg-type]  # bytes are taken, too
        except RuntimeError as error:
            raise LinkBroken(f"no rendezvous: {faults[0] if faults else error}") from error
        finally:
            # Without the peer's key, the builder ends at the group's own time-out.
            builder.join(2 * timeout_s)
        if not built:
            raise LinkBroken(f"no link: {faults[0] if faults else 'timed out'}")
        return cls(built[0], member)

    def watch(self, on_end: Callable[[str | None], None]) -> None:
        """Posts the canary; `on_end` is called once, from a thread of its own.

        It gets None after the peer's goodbye or our own `destroy`, else what happened.
        """
        buffer = torch.zeros(1, dtype=torch.uint8)
        work = self._group.recv([buffer], self._peer, _CANARY_TAG)

        def wait() -> None:
            detail = None
            try:
                work.wait(_FOREVER)
            except RuntimeError as error:
                if not self._is_destroyed.is_set():
                    detail = _first_line(error)
            on_end(detail)

        self._canary = threading.Thread(target=wait, name="link-canary", daemon=True)
        self._canary.start()

    def send(self, payload: Tensor) -> Work:
        """Starts sending one frame."""
        with _as_link_broken():
            return self._group.send([payload], self._peer, _FRAME_TAG)

    def post_receive(self, slot: Tensor) -> Work:
        """Starts receiving one frame into a landing slot of exactly its size."""
        with _as_link_broken():
            return self._group.recv([slot], self._peer, _FRAME_TAG)

    def wait(self, work: Work, timeout_s: float) -> None:
        """Waits for a frame; the link is dead if it does not come through in time.

        Raises:
            LinkBroken: the peer died or is too slow.
        """
        with _as_link_broken():
            work.wait(timedelta(seconds=timeout_s))

    def say_goodbye(self, channel: NoticeChannel) -> None:
        """Tells the peer that nothing more comes, on both sockets: whichever it looks at first."""
        goodbye = torch.ones(1, dtype=torch.uint8)
        channel.say_goodbye()
        with suppress(LinkBroken):  # the peer may have left first
            with _as_link_broken():
                work = self._group.send([goodbye], self._peer, _CANARY_TAG)
            self.wait(work, GOODBYE_TIMEOUT_S)

    def destroy(self) -> None:
        """Closes the pair and waits for the canary's end; any thread but the canary's own."""
        self._is_destroyed.set()
        scrap = torch.zeros(1, dtype=torch.uint8)
        with suppress(RuntimeError):  # it times out, as meant, or the pair is closed already
            self._group.recv([scrap], self._peer, _POISON_TAG).wait(timedelta(milliseconds=1))
        if self._canary is not None:
            self._canary.join(5)


@contextmanager
def _as_link_broken() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LinkBroken(_first_line(error)) from error


def _make_group(store: HashStore, member: int, host: str, timeout_s: float) -> _Group:
    # torch's stubs know neither these options nor the constructor that takes them; the one they
    # know listens on the default address.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return cast(_Group, ProcessGroupGloo(store, member, 2, options))


def checksum(payload: Tensor) -> int:
    """Returns the CRC-32 of a contiguous uint8 tensor (3 GiB/s on one Sapphire Rapids core)."""
    return zlib.crc32(payload.numpy().data)


def _first_line(error: RuntimeError) -> str:
    """Returns the gist of a Gloo error, without the path of its source file."""
    return str(error).splitlines()[0].split("] ", 1)[-1][:200]
