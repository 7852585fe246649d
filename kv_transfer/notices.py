"""The small socket beside each link: length-prefixed `LinkNotice` messages, nothing else.

A peer is not trusted before its first notice carried the listener's token: sizes are capped before
anything is read, and bytes that are no notice end the connection.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from google.protobuf.message import DecodeError

from pdserve.rpc.v1 import link_pb2

MAX_NOTICE_BYTES = 4096
GOODBYE_TIMEOUT_S = 0.5
MAX_FAILURE_CHARACTERS = 200
_LENGTH = struct.Struct("!I")


class LinkBroken(Exception):
    """The peer is gone, silent for too long, or does not keep to the protocol."""


class PeerSaidBye(Exception):
    """The peer ends the link in good order."""


def take_bye(bye: link_pb2.LinkBye) -> NoReturn:
    """Ends a loop over notices.

    Raises:
        PeerSaidBye: the link ends in good order.
        LinkBroken: the peer failed.
    """
    if bye.failure:
        raise LinkBroken(f"the peer ended the link: {bye.failure}")
    raise PeerSaidBye


class NoticeChannel:
    """Sends and receives notices on a connected stream socket. One thread at a time each way.

    Any other thread may `wake` the one that is in `wait`.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes the socket over."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._buffer = bytearray()
        self._wake_lock = threading.Lock()
        self._wake_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)

    def send(self, notice: link_pb2.LinkNotice, timeout_s: float) -> None:
        """Writes one notice.

        Raises:
            LinkBroken: the peer is gone, or takes nothing for `timeout_s`.
        """
        self.send_all((notice,), timeout_s)

    def try_send(self, notice: link_pb2.LinkNotice) -> bool:
        """Writes one notice, unless the peer has left no room; says whether it did.

        What has begun is ended: a socket that takes a byte has room for more than a notice.

        Raises:
            LinkBroken: the peer is gone.
        """
        payload = notice.SerializeToString()
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        rest = self._send_some(data)
        if len(rest) == len(data):
            return False
        self._send_rest(rest, GOODBYE_TIMEOUT_S)
        return True

    def send_all(self, notices: Sequence[link_pb2.LinkNotice], timeout_s: float) -> None:
        """Writes several notices at once.

        Raises:
            LinkBroken: the peer is gone, or takes nothing for `timeout_s`.
        """
        data = bytearray()
        for notice in notices:
            payload = notice.SerializeToString()
            data += _LENGTH.pack(len(payload)) + payload
        self._send_rest(memoryview(data), timeout_s)

    def receive(self, timeout_s: float | None) -> link_pb2.LinkNotice | None:
        """Reads one notice; None when none has come in `timeout_s` (None waits for ever).

        Raises:
            LinkBroken: end of stream, or bytes that are no notice.
        """
        while True:
            notice = self._take()
            if notice is not None:
                return notice
            # Read first: who asks again and again need not ask for readiness each time.
            try:
                piece = self._socket.recv(MAX_NOTICE_BYTES)
            except BlockingIOError:
                if timeout_s == 0 or not self._wait(select.POLLIN, timeout_s):
                    return None
                continue
            except OSError as error:
                raise LinkBroken(f"the notice socket broke: {error}") from error
            if not piece:
                raise LinkBroken("the peer closed the notice socket")
            self._buffer += piece

    def expect(self, kind: str, timeout_s: float) -> link_pb2.LinkNotice:
        """Reads one notice, which must be of the named kind.

        Raises:
            LinkBroken: another one came, or none in time.
        """
        notice = self.receive(timeout_s)
        if notice is None:
            raise LinkBroken(f"no {kind} within {timeout_s} s")
        if notice.WhichOneof("notice") != kind:
            raise LinkBroken(f"{notice.WhichOneof('notice')} came instead of {kind}")
        return notice

    def wait(self, timeout_s: float | None) -> None:
        """Waits for a notice, an end of stream, or `wake`; None waits for ever."""
        assert self._wake_fd is not None
        ready = self._poller.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def wait_for_wake(self, timeout_s: float | None) -> None:
        """Waits for `wake` alone; None waits for ever."""
        assert self._wake_fd is not None
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if poller.poll(None if timeout_s is None else timeout_s * 1000):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """Ends a `wait`, the present or the next one; from any thread, also after `close`."""
        with self._wake_lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def wait_until_closed(self, is_over: Callable[[], bool]) -> None:
        """Waits until the peer has closed its end, or it is over for another reason (`wake`)."""
        while not is_over():
            self.wait(None)
            try:
                if not self._socket.recv(MAX_NOTICE_BYTES):
                    return
            except BlockingIOError:
                continue
            except OSError:
                return

    def say_goodbye(self, failure: str = "") -> None:
        """Tells the peer that nothing more comes, and why if it is a failure."""
        bye = link_pb2.LinkBye(failure=failure[:MAX_FAILURE_CHARACTERS])
        with suppress(LinkBroken):  # the peer may have left first
            self.send(link_pb2.LinkNotice(bye=bye), GOODBYE_TIMEOUT_S)

    def shut_sending(self) -> None:
        """Lets the peer see an end of stream; what it still sends can be read."""
        with suppress(OSError):  # it was shut already, or the peer is gone
            self._socket.shutdown(socket.SHUT_WR)

    def shut(self, *, may_still_send: bool = False) -> None:
        """Wakes a thread in `receive` with an end of stream; callable from any thread."""
        with suppress(OSError):  # it was shut already, or the peer is gone
            self._socket.shutdown(socket.SHUT_RD if may_still_send else socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket; no other thread may use the channel any more, but for `wake`."""
        self._socket.close()
        with self._wake_lock:
            if self._wake_fd is not None:
                os.close(self._wake_fd)
            self._wake_fd = None

    def _send_rest(self, rest: memoryview, timeout_s: float) -> None:
        while rest := self._send_some(rest):
            if not self._wait(select.POLLOUT, timeout_s):
                raise LinkBroken("the notice socket is stuck")

    def _send_some(self, data: memoryview) -> memoryview:
        """Writes what the socket takes at once; returns the rest."""
        try:
            return data[self._socket.send(data) :]
        except BlockingIOError:
            return data
        except OSError as error:
            raise LinkBroken(f"the notice socket broke: {error}") from error

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        # poll, not select: a busy worker may hold descriptors above 1023.
        poller = select.poll()
        poller.register(self._socket, event)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _take(self) -> link_pb2.LinkNotice | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_NOTICE_BYTES:
            raise LinkBroken(f"a notice of {length} bytes, at most {MAX_NOTICE_BYTES} are allowed")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            notice = link_pb2.LinkNotice.FromString(payload)
        except DecodeError as error:
            raise LinkBroken("bytes that are no notice") from error
        if notice.WhichOneof("notice") is None:
            raise LinkBroken("an empty notice")
        return notice
