"""A second "host" for tests: a network namespace joined to this one by a veth pair.

Processes of both share file system and process ids, but reach each other over the pair alone.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from launcher.held_port import HeldPort
from launcher.redis_server import find_program
from pdserve.process import spawn
from tests.support.cluster import wait_until


@dataclass(frozen=True)
class NetNamespace:
    """The other host; `near` is this one's address on the pair, `far` the other one's."""

    name: str
    near: str
    far: str
    near_device: str

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Returns what runs a program there."""
        return ["ip", "netns", "exec", self.name, *argv]

    def cut(self) -> None:
        """Pulls the cable: packets are lost, nobody is told."""
        run("ip", "link", "set", self.near_device, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.near_device, "up")

    def listening(self) -> set[str]:
        """Returns the addresses on which anything listens there."""
        return addresses_in(run(*self.wrap(["ss", "-Htnl"])))


def addresses_in(table: str) -> set[str]:
    """Returns the local addresses of a table of `ss -Htnl`, without their ports."""
    return {line.split()[3].rpartition(":")[0] for line in table.splitlines()}


@contextlib.contextmanager
def running_redis(host: str) -> Iterator[str]:
    """Runs a Redis that answers on one address of this host; gives its URL."""
    with contextlib.closing(HeldPort(host)) as held:
        argv = [str(find_program()), "--bind", host, "--port", str(held.number)]
        argv += ["--save", "", "--protected-mode", "no"]
        redis = spawn(argv, stdout=subprocess.DEVNULL, name="redis")
        try:
            wait_until(lambda: answers(host, held.number), 30.0)
            yield f"redis://{host}:{held.number}/0"
        finally:
            redis.stop(5.0)


def answers(host: str, port: int) -> bool:
    """Says whether anything listens there."""
    with socket.socket() as connection:
        return connection.connect_ex((host, port)) == 0


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def net_namespace() -> Iterator[NetNamespace]:
    """Makes one; skips the test where that is not possible."""
    missing = [tool for tool in ("ip", "ss") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"network namespaces need {' and '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    number = secrets.randbelow(60_000)
    tag = f"pds{number:05d}"
    subnet = f"10.{200 + number // 8192}.{number // 32 % 256}"
    first = number % 32 * 8
    found = NetNamespace(
        name=tag, near=f"{subnet}.{first + 1}", far=f"{subnet}.{first + 2}", near_device=f"{tag}a"
    )
    probe = subprocess.run(
        ["ip", "netns", "add", tag], capture_output=True, text=True, timeout=20, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"network namespaces do not work here: {probe.stderr.strip()}")
    far_device = f"{tag}b"
    try:
        run("ip", "link", "add", found.near_device, "type", "veth", "peer", "name", far_device)
        run("ip", "link", "set", far_device, "netns", tag)
        run("ip", "addr", "add", f"{found.near}/29", "dev", found.near_device)
        run("ip", "link", "set", found.near_device, "up")
        run("ip", "-n", tag, "addr", "add", f"{found.far}/29", "dev", far_device)
        run("ip", "-n", tag, "link", "set", far_device, "up")
        run("ip", "-n", tag, "link", "set", "lo", "up")
        yield found
    finally:
        for pid in run("ip", "netns", "pids", tag).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        subprocess.run(["ip", "link", "del", found.near_device], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", tag], capture_output=True, check=False)
