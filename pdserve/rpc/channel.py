"""Sockets that carry protobuf messages between the processes of one replica.

On one machine a SEQPACKET pair, made by `make_pair`: a round trip takes about 20 us. Between nodes
a TCP connection, made ready by `prepare_stream`. The kind of the socket alone tells the two apart.
"""

import asyncio
import socket
import threading
from collections import deque
from contextlib import suppress

from pdserve.rpc.framing import (
    MAX_MESSAGE_BYTES,
    PACKET_BYTES,
    Framing,
    MessageTooLong,
    PacketFraming,
    StreamFraming,
)

_READ_BYTES = PACKET_BYTES + 1
"""A whole packet, or as much of a stream."""
_NUM_PROBES = 3


class ChannelClosed(Exception):
    """The other end is gone, or does not keep to the protocol."""


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two connected ends; neither is inherited by children unless asked for."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def prepare_stream(sock: socket.socket, silence_s: float) -> None:
    """Makes a TCP connection send at once, and break when its peer's kernel is not heard of.

    Args:
        sock: connected.
        silence_s: about when; idle or not.
    """
    interval_s = max(1, int(silence_s / (_NUM_PROBES + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    # What was sent and never acknowledged: keepalive does not probe meanwhile.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def _framing_of(sock: socket.socket, max_message_bytes: int) -> Framing:
    if sock.type == socket.SOCK_SEQPACKET:
        return PacketFraming(max_message_bytes)
    assert sock.type == socket.SOCK_STREAM, f"no channel over {sock.type}"
    return StreamFraming(max_message_bytes)


class _Reader:
    """Turns pieces into messages."""

    def __init__(self, framing: Framing) -> None:
        self._framing = framing
        self._waiting: deque[bytes] = deque()

    def take(self) -> bytes | None:
        return self._waiting.popleft() if self._waiting else None

    def feed(self, piece: bytes) -> None:
        if not piece:
            raise ChannelClosed("the other end closed the channel")
        try:
            self._waiting += self._framing.feed(piece)
        except MessageTooLong as error:
            raise ChannelClosed(str(error)) from error


class BlockingChannel:
    """An end in a process of threads: any of them sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Owns the socket."""
        self._sock = sock
        self._sock.setblocking(True)
        self._framing = _framing_of(sock, MAX_MESSAGE_BYTES)
        self._reader = _Reader(self._framing)
        self._send_lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Sends a message, waiting while the other end does not read.

        Raises:
            ChannelClosed: the other end is gone.
        """
        with self._send_lock:
            try:
                for piece in self._framing.cut(message):
                    self._sock.sendall(piece)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def receive(self) -> bytes:
        """Waits for the next message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        while True:
            message = self._reader.take()
            if message is not None:
                return message
            try:
                piece = self._sock.recv(_READ_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._reader.feed(piece)

    def close(self) -> None:
        """Closes this end, also under a thread that still receives."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class AsyncChannel:
    """An end on an event loop."""

    def __init__(self, sock: socket.socket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Owns the socket.

        Args:
            sock: connected.
            max_message_bytes: that the other end may send; see `trust`.
        """
        self._sock = sock
        self._sock.setblocking(False)
        self._framing = _framing_of(sock, max_message_bytes)
        self._reader = _Reader(self._framing)
        self._send_lock = asyncio.Lock()

    def trust(self) -> None:
        """Lets the other end, which has proven who it is, send messages of any allowed size."""
        self._framing.max_message_bytes = MAX_MESSAGE_BYTES

    async def send(self, message: bytes) -> None:
        """Sends a message; concurrent senders take turns, so messages never mix.

        A send that is cancelled half-way leaves a channel that must be closed.

        Raises:
            ChannelClosed: the other end is gone.
        """
        loop = asyncio.get_running_loop()
        async with self._send_lock:
            try:
                for piece in self._framing.cut(message):
                    await loop.sock_sendall(self._sock, piece)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    async def receive(self) -> bytes:
        """Waits for the next message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        loop = asyncio.get_running_loop()
        while True:
            message = self._reader.take()
            if message is not None:
                return message
            try:
                piece = await loop.sock_recv(self._sock, _READ_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._reader.feed(piece)

    def detach(self) -> socket.socket:
        """Gives the socket away.

        Raises:
            ChannelClosed: the other end sent more than the messages that were received.
        """
        if self._framing.holds_part or self._reader.take() is not None:
            raise ChannelClosed("the other end spoke out of turn")
        return self._sock

    def shut(self) -> None:
        """Ends it: whoever waits here, or at the other end, finds the channel closed."""
        with suppress(OSError):  # the other end may have left first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket; nobody waits on it any more."""
        self._sock.close()
