"""A free port that stays free until whoever it is meant for listens on it."""

import socket

from pdserve.errors import ConfigError
from pdserve.rpc.server import resolve_host


class HeldPort:
    """A TCP port that the system gives to nobody else, from its choice to `close`.

    A server that is told its number may listen on it all the while, and again after a restart: the
    holder does not listen, and both allow the address to be used again (SO_REUSEADDR).
    """

    def __init__(self, host: str) -> None:
        """Takes one that is free on a host.

        Raises:
            ConfigError: the host is not ours.
        """
        address = resolve_host(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._holder.bind((address, 0))
        except OSError as error:
            self._holder.close()
            raise ConfigError(f"cannot listen on {host}: {error.strerror}") from error
        self.number: int = self._holder.getsockname()[1]

    def close(self) -> None:
        """Lets go of it; may be repeated."""
        self._holder.close()
