"""A SEQPACKET socket pair that carries protobuf messages between a face and its rank.

A message larger than one packet travels as several; the first byte of a packet says whether more
follow. One writer and one reader per end; a round trip takes about 20 us.
"""

import asyncio
import socket

_MORE = b"\x00"
_LAST = b"\x01"
_PACKET_BYTES = 60 * 1024
"""Well under the default socket buffer (208 KiB), so that one packet always fits."""
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class ChannelClosed(Exception):
    """The other end is gone."""


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two connected ends; neither is inherited by children unless asked for."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _packets(data: bytes) -> list[bytes]:
    pieces = [data[i : i + _PACKET_BYTES] for i in range(0, len(data), _PACKET_BYTES)] or [b""]
    return [_MORE + piece for piece in pieces[:-1]] + [_LAST + pieces[-1]]


class _Assembler:
    """Joins packets to messages."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def feed(self, packet: bytes) -> bytes | None:
        """Takes one packet; returns a message when it is whole."""
        if not packet:
            raise ChannelClosed("the other end closed the channel")
        self._parts.append(packet[1:])
        self._num_bytes += len(packet) - 1
        if self._num_bytes > _MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"a message of over {_MAX_MESSAGE_BYTES} bytes")
        if packet[:1] == _MORE:
            return None
        message = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        return message


class BlockingChannel:
    """The rank's end: one thread sends, another receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Owns the socket."""
        self._sock = sock
        self._sock.setblocking(True)
        self._assembler = _Assembler()

    def send(self, message: bytes) -> None:
        """Sends a message, waiting while the other end does not read.

        Raises:
            ChannelClosed: the other end is gone.
        """
        try:
            for packet in _packets(message):
                self._sock.send(packet)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> bytes:
        """Waits for the next message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        while True:
            try:
                packet = self._sock.recv(_PACKET_BYTES + 1)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            message = self._assembler.feed(packet)
            if message is not None:
                return message

    def close(self) -> None:
        """Closes this end."""
        self._sock.close()


class AsyncChannel:
    """The face's end, on the event loop."""

    def __init__(self, sock: socket.socket) -> None:
        """Owns the socket."""
        self._sock = sock
        self._sock.setblocking(False)
        self._assembler = _Assembler()
        self._send_lock = asyncio.Lock()

    async def send(self, message: bytes) -> None:
        """Sends a message; concurrent senders take turns, so messages never mix.

        Raises:
            ChannelClosed: the other end is gone.
        """
        loop = asyncio.get_running_loop()
        async with self._send_lock:
            try:
                for packet in _packets(message):
                    await loop.sock_sendall(self._sock, packet)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    async def receive(self) -> bytes:
        """Waits for the next message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                packet = await loop.sock_recv(self._sock, _PACKET_BYTES + 1)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            message = self._assembler.feed(packet)
            if message is not None:
                return message

    def close(self) -> None:
        """Closes this end."""
        self._sock.close()
