"""Where the holder of a stage lets its face in, and nobody else."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from pdserve.errors import ConfigError
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.server import join_address, resolve_host
from pdserve.rpc.stage_handshake import MAX_HELLO_BYTES, Claim, HelloRefused, admit

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
_MAX_STRANGERS = 32
"""Connections that have not proven themselves yet; one more is refused at once."""

OnClaim = Callable[[Claim, AsyncChannel], Awaitable[None]]


class Door:
    """A listening socket on one named address; counts whom it refused."""

    def __init__(self, host: str, port: int) -> None:
        """Listens.

        Raises:
            ConfigError: the host does not resolve, or the port is in use or forbidden.
        """
        address = resolve_host(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((address, port))
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}") from error
        self._listener.listen()
        self._listener.setblocking(False)
        self.address = join_address(address, self._listener.getsockname()[1])
        self.num_refused = 0
        self._strangers: set[asyncio.Task[None]] = set()

    async def open(self, token: bytes, worker_id: str, stage: int, on_claim: OnClaim) -> None:
        """Accepts until cancelled; `on_claim` owns the channels of those that have the token."""
        loop = asyncio.get_running_loop()
        while True:
            connection, peer = await loop.sock_accept(self._listener)
            if len(self._strangers) >= _MAX_STRANGERS:
                self._refuse(peer, "too many at once")
                connection.close()
                continue
            channel = AsyncChannel(connection, MAX_HELLO_BYTES)

            async def greet(channel: AsyncChannel = channel, peer: object = peer) -> None:
                try:
                    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                        claim = await admit(channel, token, worker_id=worker_id, stage=stage)
                except (HelloRefused, TimeoutError) as error:
                    self._refuse(peer, str(error) or "it said nothing")
                    channel.close()
                    return
                try:
                    await on_claim(claim, channel)
                except ChannelClosed:
                    channel.close()

            task = asyncio.create_task(greet())
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    def close(self) -> None:
        """Stops to listen and drops who is still at the door."""
        for task in self._strangers:
            task.cancel()
        self._listener.close()

    def _refuse(self, peer: object, reason: str) -> None:
        self.num_refused += 1
        logger.warning("connection refused", extra={"peer": str(peer), "reason": reason})
