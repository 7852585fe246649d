"""The HTTP listener: uvicorn inside of an event loop and a process that are not its own."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdserve.errors import ConfigError
from pdserve.rpc.server import check_port_is_free, join_address, resolve_host, shared_socket

ABORT_KEY = "pdserve.abort"
"""Scope key of what resets the connection: ASGI has no word for that."""
FIRST_REQUEST_TIMEOUT_S = 30.0
"""A connection that has not sent a whole request head by then is reset."""
KEEP_ALIVE_S = 75
"""Over the 60 s after which most proxies drop idle connections from their side."""
SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel holds for a client that does not read; it would grow to 4 MiB by itself."""
_BACKLOG = 1024


class HttpServer:
    """One listener on one address. Life: make -> start -> stop."""

    def __init__(self, app: ASGIApp) -> None:
        """Listens nowhere yet."""
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config = config
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Binds exactly one address and accepts; returns the port, port 0 takes a free one.

        Args:
            host: name or address.
            port: of this listener.
            shares_port: others of this user may listen there too, and get their share of clients.

        Raises:
            ConfigError: the host does not resolve, or the port is in use or forbidden.
        """
        address = resolve_host(host)
        if shares_port:
            listener = shared_socket(address)
        else:
            check_port_is_free(address, port, "http_port")
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            where = join_address(host, port)
            raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
        listener.setblocking(False)
        bound_port = int(listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve([listener]), name="http")
        while not self._server.started:
            await asyncio.sleep(0)
            if self._task.done():
                # Raises what ended it.
                await self._task
        return bound_port

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing new; running answers are cut after the grace."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await asyncio.wait((self._task,))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: they are the router's."""
        yield


class _Protocol(H11Protocol):
    """Tells the application how to reset its connection; resets silent ones itself."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = _with_abort(self.app, transport.abort)
        self.loop.call_later(FIRST_REQUEST_TIMEOUT_S, self._reset_if_silent)

    def send_400_response(self, msg: str) -> None:
        """Says that bytes are no HTTP, unless an answer has begun, and ends the connection.

        The application may be about to answer, when only the body is bad: nothing of it is sent.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _reset_if_silent(self) -> None:
        if self.cycle is None and self.conn.their_state is h11.IDLE:
            self.transport.abort()


def _with_abort(app: object, abort: Callable[[], None]) -> ASGIApp:
    inner: ASGIApp = app  # type: ignore[assignment]  # uvicorn has types of its own for the same

    async def with_abort(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ABORT_KEY] = abort
        await inner(scope, receive, send)

    return with_abort
