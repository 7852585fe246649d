"""Which network interface NCCL's own sockets use: the one that has this node's `--host`."""

import fcntl
import ipaddress
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
FAMILY_VARIABLE = "NCCL_SOCKET_FAMILY"
_SIOCGIFCONF = 0x8912
"""Of Linux: all IPv4 addresses, each as a name of 16 bytes and a sockaddr; see netdevice(7)."""
_REQUEST_BYTES = 40
_MOST_REQUESTS = 1024
_V6_ADDRESSES = Path("/proc/net/if_inet6")

Interfaces = Mapping[str, Sequence[str]]
"""Numeric addresses of each."""


def nccl_environment(address: str, interfaces: Interfaces) -> dict[str, str]:
    """Returns what makes NCCL listen where all else of this node does. Pure.

    Nothing where no interface has the address: NCCL then chooses by itself, as it does where a user
    named one.

    Args:
        address: a numeric one, that listeners bind.
        interfaces: of this node.
    """
    name = find_interface(address, interfaces)
    if name is None:
        return {}
    is_v6 = _parse(address).version == 6
    # `=`: exactly this one, and not all whose names begin so. NCCL takes an interface's first
    # address of the family.
    return {INTERFACE_VARIABLE: f"={name}", FAMILY_VARIABLE: "AF_INET6" if is_v6 else "AF_INET"}


def find_interface(address: str, interfaces: Interfaces) -> str | None:
    """Returns the interface that has an address; all of 127.0.0.0/8 are the loopback's. Pure."""
    wanted, scope = _parse(address), address.partition("%")[2]
    for name, addresses in interfaces.items():
        if scope and name != scope:
            continue
        found = [_parse(text) for text in addresses]
        if wanted in found:
            return name
        if wanted.is_loopback and any(one.is_loopback for one in found):
            return name
    return None


def list_interfaces() -> dict[str, tuple[str, ...]]:
    """Returns the addresses of this node's interfaces; Linux."""
    found: dict[str, list[str]] = {}
    for name, address in (*_list_v4(), *_list_v6()):
        found.setdefault(name, []).append(address)
    return {name: tuple(addresses) for name, addresses in found.items()}


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _list_v4() -> Iterator[tuple[str, str]]:
    room = array("B", bytes(_REQUEST_BYTES * _MOST_REQUESTS))
    asked = struct.pack("iP", len(room), room.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        num_bytes, _ = struct.unpack("iP", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, asked))
    answer = room.tobytes()[:num_bytes]
    for start in range(0, num_bytes, _REQUEST_BYTES):
        label = answer[start : start + 16].partition(b"\0")[0].decode()
        # An address that was added with a label of its own: eth0:1 is eth0's.
        name = label.partition(":")[0]
        yield name, socket.inet_ntop(socket.AF_INET, answer[start + 20 : start + 24])


def _list_v6() -> Iterator[tuple[str, str]]:
    if not _V6_ADDRESSES.exists():
        # A kernel without IPv6.
        return
    for line in _V6_ADDRESSES.read_text(encoding="ascii").splitlines():
        digits, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
