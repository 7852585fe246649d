"""Bucket edges that existing dashboards use, and the /metrics server."""

import socket
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CollectorRegistry

from pdserve.errors import ConfigError
from pdserve.exposition import CONTENT_TYPE, Exposes, TextExposition
from pdserve.rpc.server import check_port_is_free, join_address, resolve_host

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FINE_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, *ITL_BUCKETS_S)
"""For our own series: the common edges are too coarse below 10 ms."""
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Whole requests, queue, prefill and decode times."""
TOKEN_COUNT_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""1-2-5 steps for prompt and output lengths."""
READ_TIMEOUT_S = 10.0
"""A connection to the /metrics port that asks for nothing is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsServer:
    """A running /metrics listener."""

    address: str
    """host:port."""
    server: ThreadingHTTPServer
    thread: Thread

    def close(self) -> None:
        """Stops listening and joins the thread."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serves one registry at http://host:port/metrics from a daemon thread; port 0 takes any.

    Raises:
        ConfigError: the address cannot be bound.
    """
    return serve_exposition(TextExposition(registry), host, port)


def serve_exposition(exposition: Exposes, host: str, port: int) -> MetricsServer:
    """Serves whatever writes series, each scrape on a thread of its own; raises as above."""
    address = resolve_host(host)
    check_port_is_free(address, port, "metrics_port")
    try:
        server = _server_at(address)((address, port), _handler_of(exposition))
    except OSError as error:
        where = join_address(host, port)
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    bound_port = int(server.server_address[1])
    return MetricsServer(address=join_address(address, bound_port), server=server, thread=thread)


class _ServerV6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def _server_at(address: str) -> type[ThreadingHTTPServer]:
    return _ServerV6 if ":" in address else ThreadingHTTPServer


def _handler_of(exposition: Exposes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET, of any path, with all series."""

        timeout = READ_TIMEOUT_S
        # Head and body are two writes: the second would wait for the first to be acknowledged.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = exposition.generate()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: scrapes come every few seconds."""

    return Handler
