import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from pdserve import metrics
from pdserve.errors import ConfigError


def test_metrics_are_served_from_the_registry_that_was_passed():
    registry = CollectorRegistry()
    Counter("pdserve_things", "Things.", registry=registry).inc(3)
    server = metrics.serve_metrics(registry, "127.0.0.1", 0)
    try:
        url = f"http://{server.address}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url) as answer:
            body = answer.read().decode()
    finally:
        server.close()
    assert "pdserve_things_total 3.0" in body


def test_a_metrics_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            metrics.serve_metrics(CollectorRegistry(), "127.0.0.1", port)


def test_bucket_edges_rise():
    for edges in (
        metrics.TTFT_BUCKETS_S,
        metrics.FINE_ITL_BUCKETS_S,
        metrics.REQUEST_BUCKETS_S,
        metrics.TOKEN_COUNT_BUCKETS,
    ):
        assert list(edges) == sorted(set(edges))
    assert len(metrics.TTFT_BUCKETS_S) == 22
    assert len(metrics.ITL_BUCKETS_S) == 19
