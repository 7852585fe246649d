"""A TCP relay in front of a server: reads it slowly, or resets its connection."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

DRIP_S = 1.0
"""A slow relay takes one byte from the server each time."""
BUFFER_BYTES = 4096
HANDSHAKE_BYTES = 512
"""Relayed at once: without the server's settings a client sends no request."""


class TcpProxy:
    """Relays connections to one address. Belongs to one event loop."""

    def __init__(self, target: str, *, is_slow: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._is_fast = asyncio.Event()
        self.connected = asyncio.Event()
        """Set with the first connection to the server."""
        if not is_slow:
            self._is_fast.set()
        self._servers: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()
        return f"{host}:{port}"

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def speed_up(self) -> None:
        """Ends the slowness."""
        self._is_fast.set()

    def reset(self) -> None:
        """Ends all connections to the server with RST instead of FIN, and takes no new one."""
        assert self._listener is not None
        self._listener.close()
        for server in self._servers:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        server = socket.socket()
        # A small window, or the kernel would read ahead for the slow client.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        server.setblocking(False)
        await loop.sock_connect(server, self._target)
        self._servers.append(server)
        self.connected.set()
        tasks = [
            asyncio.create_task(self._to_server(reader, server)),
            asyncio.create_task(self._to_client(server, writer)),
        ]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            server.close()
            writer.transport.abort()

    async def _to_server(self, reader: asyncio.StreamReader, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await loop.sock_sendall(server, data)

    async def _to_client(self, server: socket.socket, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        num_bytes = 0
        with contextlib.suppress(OSError):
            while True:
                is_fast = self._is_fast.is_set() or num_bytes < HANDSHAKE_BYTES
                data = await loop.sock_recv(server, 1 << 16 if is_fast else 1)
                if not data:
                    return
                num_bytes += len(data)
                writer.write(data)
                await writer.drain()
                if not is_fast:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DRIP_S):
                            await self._is_fast.wait()


@asynccontextmanager
async def running_proxy(target: str, *, is_slow: bool = False) -> AsyncIterator[TcpProxy]:
    """Starts a relay and closes it at the end."""
    proxy = TcpProxy(target, is_slow=is_slow)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
