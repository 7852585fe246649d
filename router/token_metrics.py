"""Series that change with every token: plain numbers, turned into samples by a scrape.

A Counter and two Histograms of the client library would take four locks per token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.metrics import FINE_ITL_BUCKETS_S, ITL_BUCKETS_S


class TokenMetrics(Collector):
    """Tokens streamed and the gaps between them. Written by one thread, read by any."""

    def __init__(self, label_names: Sequence[str], label_values: Sequence[str]) -> None:
        """Starts at zero."""
        self._label_names = tuple(label_names)
        self._label_values = tuple(label_values)
        self._num_tokens = 0
        self._gap_sum_s = 0.0
        # One more for what is above the last edge.
        self._gap_counts = [0] * (len(FINE_ITL_BUCKETS_S) + 1)

    @property
    def num_tokens(self) -> int:
        """Tokens streamed since the start."""
        return self._num_tokens

    def note(self, count: int, gap_s: float | None) -> None:
        """Counts tokens of one message; `gap_s` is the time since the one before."""
        self._num_tokens += count
        if gap_s is not None and count:
            self._gap_sum_s += gap_s
            self._gap_counts[bisect_left(FINE_ITL_BUCKETS_S, gap_s)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yields what a scrape shows."""
        generated = CounterMetricFamily(
            "vllm:generation_tokens", "Tokens streamed.", labels=self._label_names
        )
        generated.add_metric(self._label_values, self._num_tokens)
        yield generated
        below = list(accumulate(self._gap_counts))
        by_edge = dict(zip(FINE_ITL_BUCKETS_S, below, strict=False))
        for name, edges in (
            ("vllm:inter_token_latency_seconds", ITL_BUCKETS_S),
            ("pdserve_inter_token_latency_seconds", FINE_ITL_BUCKETS_S),
        ):
            gaps = HistogramMetricFamily(name, "Gaps.", labels=self._label_names)
            buckets = [(str(edge), float(by_edge[edge])) for edge in edges]
            buckets.append(("+Inf", float(below[-1])))
            gaps.add_metric(self._label_values, buckets, sum_value=self._gap_sum_s)
            yield gaps
