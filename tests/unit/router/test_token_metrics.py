from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdserve.metrics import FINE_ITL_BUCKETS_S, ITL_BUCKETS_S
from router.token_metrics import TokenMetrics

GAPS_S = (0.0, 0.001, 0.0011, 0.005, 0.01, 0.3, 80.0, 81.0)


def _lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def test_gaps_are_shown_as_a_histogram_of_the_client_library_would_show_them():
    expected = CollectorRegistry()
    for name, edges in (
        ("vllm:inter_token_latency_seconds", ITL_BUCKETS_S),
        ("pdserve_inter_token_latency_seconds", FINE_ITL_BUCKETS_S),
    ):
        series = Histogram(name, "Gaps.", ("engine",), registry=expected, buckets=edges)
        for gap_s in GAPS_S:
            series.labels("0").observe(gap_s)
    found = CollectorRegistry()
    metrics = TokenMetrics(("engine",), ("0",))
    found.register(metrics)
    for gap_s in GAPS_S:
        metrics.note(1, gap_s)
    assert [line for line in _lines(found) if "inter_token" in line] == _lines(expected)


def test_tokens_are_counted_with_and_without_a_gap():
    registry = CollectorRegistry()
    metrics = TokenMetrics(("engine",), ("0",))
    registry.register(metrics)
    metrics.note(3, None)
    metrics.note(2, 0.5)
    metrics.note(0, 0.5)
    assert registry.get_sample_value("vllm:generation_tokens_total", {"engine": "0"}) == 5
    name = "vllm:inter_token_latency_seconds_count"
    assert registry.get_sample_value(name, {"engine": "0"}) == 1
