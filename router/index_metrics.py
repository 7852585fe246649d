"""What the prefix index holds, as series that are read when somebody scrapes them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.cache_watch import CacheWatch
from router.metrics import LABELS
from router.prefix_index import PrefixIndex


class IndexCollector(Collector):
    """Yields the series of one front."""

    def __init__(
        self, model_name: str, index: PrefixIndex, watch: CacheWatch, engine: str = "0"
    ) -> None:
        """Reads both at each scrape."""
        self._values = (model_name, engine, "router")
        self._index = index
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Yields every series once."""
        for name, text, value in (
            ("pdserve_index_pairs", "Granules known, times their workers.", len(self._index)),
            ("pdserve_index_bytes", "Memory of the prefix index.", self._index.num_bytes),
            ("pdserve_index_watched", "Workers that tell what they cache.", self._watch.num_fed),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        text = "Cache streams that were opened anew because something was missing."
        gaps = CounterMetricFamily("pdserve_index_gaps", text, labels=LABELS)
        gaps.add_metric(self._values, self._watch.num_gaps)
        yield gaps
