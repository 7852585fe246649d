"""Makes gRPC servers and channels with one set of limits; both ends agree on keepalive."""

import errno
import ipaddress
import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.errors import ConfigError
from pdserve.rpc.decoding import DecodingGuard

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
MIN_PING_INTERVAL_MS = 9_000
"""Clients may ping each 10 s, with or without calls: the default floor of 300 s cuts long prefills
with GOAWAY too_many_pings. One second is left for jitter."""
MAX_CONCURRENT_STREAMS = 10_000

Option = tuple[str, int | str]


class RpcServer:
    """A gRPC server with health and reflection, bound to one address.

    Life: make -> add servicers to `grpc_server` -> bind -> start -> set_serving -> stop.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        max_message_bytes: int,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        shares_port: bool = False,
    ) -> None:
        """Makes a server that listens nowhere yet.

        Args:
            service_names: full names.
            max_message_bytes: in both directions.
            interceptors: see every call first.
            shares_port: others of this user may listen there too, and get their share of clients.
        """
        self.grpc_server = grpc.aio.server(
            interceptors=(*interceptors, DecodingGuard()),
            options=_server_options(max_message_bytes, shares_port=shares_port),
        )
        self._shares_port = shares_port
        self._service_names = ("", *service_names)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc_server
        )

    def bind(self, host: str, port: int) -> int:
        """Binds exactly one address and returns the port; port 0 takes a free one.

        Raises:
            ConfigError: the host does not resolve, or the port is in use or forbidden.
        """
        address = resolve_host(host)
        if not self._shares_port:
            check_port_is_free(address, port)
        try:
            return self.grpc_server.add_insecure_port(join_address(address, port))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {join_address(host, port)}") from error

    async def start(self) -> None:
        """Accepts calls; health answers NOT_SERVING until `set_serving`."""
        await self.set_serving(False)
        await self.grpc_server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Switches the health of all services, the empty name included."""
        serving = health_pb2.HealthCheckResponse.ServingStatus
        status = serving.SERVING if is_serving else serving.NOT_SERVING
        for name in self._service_names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new calls; running ones are cut after `grace_s`, or now when None."""
        await self.grpc_server.stop(grace_s)


def make_server(
    *service_names: str,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    shares_port: bool = False,
) -> RpcServer:
    """Makes a server for the named services (full names, as in `DESCRIPTOR.full_name`)."""
    return RpcServer(service_names, max_message_bytes, interceptors, shares_port=shares_port)


def open_channel(
    address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Opens a client channel to `host:port`; it connects on first use."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))


def channel_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> list[Option]:
    """Returns the options of every client channel, for sync clients as well."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A repeated call would be a second attempt that nobody fenced.
        ("grpc.enable_retries", 0),
        # Workers are reached directly, whatever http_proxy says.
        ("grpc.enable_http_proxy", 0),
        # A new incarnation on an old address must not wait for the old one's back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _server_options(max_message_bytes: int, *, shares_port: bool) -> list[Option]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Otherwise a second server on the port is accepted and takes half of the calls.
        ("grpc.so_reuseport", int(shares_port)),
    ]


def resolve_host(host: str) -> str:
    """Returns one numeric address; gRPC itself would bind all that a name resolves to.

    Raises:
        ConfigError: the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {host!r} does not resolve: {error}", settings=("host",)) from error
    in_order = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(in_order[0][4][0])


def bind_shared_port(host: str, port: int, setting: str = "port") -> socket.socket:
    """Reserves a port for listeners that share it; returns what holds it, which listens not.

    Raises:
        ConfigError: the host does not resolve, or the port is in use or forbidden.
    """
    address = resolve_host(host)
    check_port_is_free(address, port, setting)
    holder = shared_socket(address)
    try:
        holder.bind((address, port))
    except OSError as error:
        holder.close()
        where = join_address(host, port)
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
    return holder


def shared_socket(address: str) -> socket.socket:
    """Returns a TCP socket whose address others of this user may bind as well."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def check_port_is_free(address: str, port: int, setting: str = "port") -> None:
    """Tries to bind, so that the reason is named before gRPC logs its own story.

    Args:
        address: a numeric one.
        port: of it.
        setting: the field of the configuration that names the port.

    Raises:
        ConfigError: the port is in use, forbidden, or the address is not of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"{setting} must be from 0 to 65535, got {port}", settings=(setting,))
    is_v6 = ipaddress.ip_address(address.split("%")[0]).version == 6
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            where = join_address(address, port)
            if error.errno == errno.EADDRINUSE:
                text = f"{setting} {port} is already in use ({where})"
                raise ConfigError(text, settings=(setting,)) from error
            raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
