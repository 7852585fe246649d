"""Which TCP addresses a set of processes listens on, read from /proc."""

import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, order=True)
class Listener:
    """One listening socket."""

    pid: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def listeners_of(pids: Iterable[int]) -> list[Listener]:
    """Lists every listening TCP socket of the processes, IPv4 and IPv6."""
    by_inode: dict[str, tuple[str, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, _, port = fields[1].partition(":")
                by_inode[fields[9]] = (_host(host), int(port, 16))
    found = []
    for pid in pids:
        for inode in _socket_inodes(pid):
            if inode in by_inode:
                host, port_number = by_inode[inode]
                found.append(Listener(pid, host, port_number))
    return sorted(found)


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
        if match:
            inodes.add(match[1])
    return inodes


def _host(text: str) -> str:
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw)
    address = ipaddress.IPv6Address(raw)
    # gRPC binds IPv4 addresses through IPv6 sockets.
    return str(address.ipv4_mapped or address)
