"""Who may call what: the written allow-list, and the gate in front of every RPC."""

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import grpc

from pdserve.config.router import RouterConfig
from pdserve.errors import ConfigError, Unauthenticated
from pdserve.rpc.status import AbortableContext, abort_with
from router.tenants import Keyring, parse_api_key, parse_key_lines

OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/List",
        # Version, pool sizes and counts: what /version, /health and /metrics tell over HTTP.
        "/pdserve.rpc.v1.Inference/GetServerInfo",
    }
)
"""RPCs that need no key."""
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""HTTP paths that need no key."""

Metadata = Iterable[tuple[str, str | bytes]]
Handler = grpc.RpcMethodHandler
"""Generic for type checkers alone, so it stands between quotes below."""
T = TypeVar("T")
U = TypeVar("U")


def authorization_of(metadata: Metadata | None) -> str | None:
    """Finds the `authorization` entry of a call's metadata."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


class KeyGate(grpc.aio.ServerInterceptor):
    """Refuses every RPC without a known key, unknown methods too, but for the allow-list."""

    def __init__(self, keyring: Keyring) -> None:
        """Takes the keys."""
        self._keyring = keyring

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler[T, U] | None]]",
        details: grpc.HandlerCallDetails,
    ) -> "Handler[T, U] | None":
        """Lets a call through, or answers UNAUTHENTICATED in the shape that the method has."""
        handler = await continuation(details)
        if details.method in OPEN_METHODS:
            return handler
        try:
            self._keyring.authenticate(authorization_of(details.invocation_metadata))
        except Unauthenticated as error:
            return _refusal(handler, error)
        return handler


def _refusal(handler: "Handler[T, U] | None", error: Unauthenticated) -> "Handler[T, U]":
    async def refuse(_: object, context: AbortableContext) -> None:
        await abort_with(context, error)

    takes_stream = handler is not None and handler.request_streaming
    gives_stream = handler is not None and handler.response_streaming
    if takes_stream and gives_stream:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if takes_stream:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if gives_stream:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def read_keyring(config: RouterConfig, drawn_secret: bytes) -> Keyring:
    """Gathers the keys of flags and file.

    Args:
        config: keys, file and secret.
        drawn_secret: used when the configuration has none.

    Raises:
        ConfigError: the file cannot be read, or a key is malformed.
    """
    keys = [parse_api_key(text) for text in config.api_keys]
    if config.api_keys_file is not None:
        path = Path(config.api_keys_file)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
        found = parse_key_lines(lines, str(path))
        if not found:
            raise ConfigError(f"{path} holds no API key; without the flag no key is asked for")
        keys += found
    secret = config.cluster_secret.encode() if config.cluster_secret else drawn_secret
    return Keyring(keys, secret)
