"""Free ports that stay ours until somebody listens there, and between two lives of whoever does."""

import socket
from typing import Self

from pdserve.errors import ConfigError
from pdserve.rpc.server import resolve_host


class HeldPorts:
    """Sockets that are bound and never listen.

    Linux gives a bound port to no outgoing connection, and lets another socket with SO_REUSEADDR
    bind and listen beside one that does not.
    """

    def __init__(self, host: str) -> None:
        """Holds none."""
        self._host = host
        self._holders: list[socket.socket] = []

    def take(self, port: int) -> int:
        """Returns the port, which is somebody else's to check; or for 0 a free one, held from now.

        Raises:
            ConfigError: this machine has no such address.
        """
        if port:
            return port
        address = resolve_host(self._host)
        holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._holders.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((address, 0))
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}: {error.strerror}") from error
        return int(holder.getsockname()[1])

    def close(self) -> None:
        """Lets all go."""
        while self._holders:
            self._holders.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
