"""How messages travel over a socket: in packets on one machine, behind their length over TCP. Pure.

A reader holds what has come of a message; it bounds what a peer can make it hold.
"""

import struct
from typing import Protocol

PACKET_BYTES = 60 * 1024
"""Well under the default socket buffer (208 KiB), so that one packet always fits."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MORE = b"\x00"
_LAST = b"\x01"
_LENGTH = struct.Struct("!I")


class MessageTooLong(Exception):
    """The peer announced or sent more than it may."""


class Framing(Protocol):
    """One direction's state of one socket."""

    max_message_bytes: int

    @property
    def holds_part(self) -> bool:
        """Whether the beginning of a message has come, and not its end."""
        ...

    def cut(self, message: bytes) -> list[bytes]:
        """Returns the pieces in which a message is sent, one call each."""
        ...

    def feed(self, piece: bytes) -> list[bytes]:
        """Takes what one receive call returned, never empty; returns messages that are whole now.

        Raises:
            MessageTooLong: a message is larger than `max_message_bytes`.
        """
        ...


class PacketFraming:
    """For SEQPACKET: the first byte of a packet says whether more of its message follow."""

    def __init__(self, max_message_bytes: int) -> None:
        """Holds nothing yet."""
        self.max_message_bytes = max_message_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def holds_part(self) -> bool:
        """Whether a packet said that more follow."""
        return bool(self._parts)

    def cut(self, message: bytes) -> list[bytes]:
        """Returns the packets of a message."""
        starts = range(0, len(message), PACKET_BYTES)
        pieces = [message[start : start + PACKET_BYTES] for start in starts] or [b""]
        return [_MORE + piece for piece in pieces[:-1]] + [_LAST + pieces[-1]]

    def feed(self, piece: bytes) -> list[bytes]:
        """Takes one packet; see `Framing`."""
        self._parts.append(piece[1:])
        self._num_bytes += len(piece) - 1
        if self._num_bytes > self.max_message_bytes:
            raise MessageTooLong(f"a message of over {self.max_message_bytes} bytes")
        if piece[:1] == _MORE:
            return []
        message = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        return [message]


class StreamFraming:
    """For TCP: four bytes of length, then the message."""

    def __init__(self, max_message_bytes: int) -> None:
        """Holds nothing yet."""
        self.max_message_bytes = max_message_bytes
        self._buffer = bytearray()

    @property
    def holds_part(self) -> bool:
        """Whether bytes of an unfinished message are here."""
        return bool(self._buffer)

    def cut(self, message: bytes) -> list[bytes]:
        """Returns the one piece of a message."""
        return [_LENGTH.pack(len(message)) + message]

    def feed(self, piece: bytes) -> list[bytes]:
        """Takes some bytes; see `Framing`."""
        self._buffer += piece
        found: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self.max_message_bytes:
                raise MessageTooLong(
                    f"a message of {length} bytes, at most {self.max_message_bytes} are allowed"
                )
            stop = start + _LENGTH.size + length
            if stop > len(self._buffer):
                break
            found.append(bytes(self._buffer[start + _LENGTH.size : stop]))
            start = stop
        del self._buffer[:start]
        return found
