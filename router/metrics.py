"""The router's series: our own names, and the `vllm:` names that dashboards ask for.

Labels come from fixed sets (roles, reasons, the one served model), never from a client.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.errors import PdserveError
from pdserve.metrics import (
    REQUEST_BUCKETS_S,
    TOKEN_COUNT_BUCKETS,
    TTFT_BUCKETS_S,
)
from router.attempt import Cause
from router.policy import Choice
from router.timing import RequestTimes
from router.token_metrics import TokenMetrics

LABELS = ("model_name", "engine", "role")
"""The engine is the number of the front, or `brain`."""


class RouterMetrics:
    """All series of one front, in the registry that is passed in."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str = "0") -> None:
        """Registers the series."""
        self._registry = registry
        self._values = (model_name, engine, "router")
        counter = self._counter
        self.workers_lost = counter("pdserve_router_workers_lost", "Workers declared dead.")
        self.stale_updates = counter("pdserve_router_stale_updates", "Updates of old attempts.")
        self.slow_readers = counter("pdserve_router_slow_readers", "Clients cut: too slow.")
        self.fenced_attempts = counter("pdserve_router_fenced_attempts", "Cancels sent to workers.")
        self.replacements = counter("pdserve_router_decode_replacements", "Held KV placed anew.")
        self.slo_refusals = counter(
            "pdserve_router_slo_refusals", "Requests refused: too late, by prediction."
        )
        self._attempts = self._labelled(
            "pdserve_router_retries", "Attempts after the first.", "cause"
        )
        self._picks = self._labelled("pdserve_router_picks", "Placements.", "path")
        self._refusals = self._labelled("pdserve_router_refusals", "Refusals of workers.", "reason")
        self._shed = self._labelled("pdserve_router_shed", "Requests not admitted.", "reason")
        self._picks_by_unit = self._labelled(
            "pdserve_router_choices", "Choices, by what their costs were counted in.", "unit"
        )
        self._expected = counter("pdserve_router_expected_hit_blocks", "Cached blocks expected.")
        self._done = self._labelled("pdserve_requests", "Requests by their end.", "finished_reason")
        self._success = self._labelled(
            "vllm:request_success", "Requests that ended by themselves.", "finished_reason"
        )
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self.tokens = TokenMetrics(LABELS, self._values)
        registry.register(self.tokens)
        self._running = self._gauge("vllm:num_requests_running", "Requests on a worker.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests without a worker.")
        self._ttft = self._pair("time_to_first_token_seconds", "First token.", TTFT_BUCKETS_S)
        self._e2e = self._pair("e2e_request_latency_seconds", "Whole request.", REQUEST_BUCKETS_S)
        self._queue = self._pair("request_queue_time_seconds", "Queues.", REQUEST_BUCKETS_S)
        self._prefill = self._pair("request_prefill_time_seconds", "Prefill.", REQUEST_BUCKETS_S)
        self._decode = self._pair("request_decode_time_seconds", "Decode.", REQUEST_BUCKETS_S)
        self._prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt lengths.", TOKEN_COUNT_BUCKETS
        )
        self._output_length = self._histogram(
            "vllm:request_generation_tokens", "Output lengths.", TOKEN_COUNT_BUCKETS
        )

    def note_load(self, *, num_running: int, num_waiting: int) -> None:
        """Sets the gauges."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def note_pick(self, choice: Choice) -> None:
        """Counts a placement."""
        self._picks.labels(*self._values, choice.path).inc()
        unit = "seconds" if choice.table.is_in_seconds else "blocks"
        self._picks_by_unit.labels(*self._values, unit).inc()
        self._expected.inc(choice.cached_blocks)

    def note_attempt(self, cause: Cause | None) -> None:
        """Counts a further attempt."""
        self._attempts.labels(*self._values, cause or "none").inc()

    def note_refusal(self, error: PdserveError) -> None:
        """Counts a worker's refusal."""
        self._refusals.labels(*self._values, error.reason.lower()).inc()

    def note_shed(self, error: PdserveError) -> None:
        """Counts a request that was refused at the door."""
        self._shed.labels(*self._values, error.reason.lower()).inc()

    def note_end(
        self,
        times: RequestTimes,
        *,
        finish: str,
        is_success: bool,
        prompt_tokens: int,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """Counts a terminal event."""
        self._done.labels(*self._values, finish).inc()
        if times.ttft_s is not None:
            _observe(self._ttft, times.ttft_s)
        if not is_success:
            return
        self._success.labels(*self._values, finish).inc()
        self._prompt.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)
        self._output_length.observe(output_tokens)
        timeline = times.stage_sums(now_s)
        _observe(self._e2e, now_s - times.received_s)
        _observe(self._queue, timeline.queue_s)
        _observe(self._prefill, timeline.prefill_s)
        _observe(self._decode, times.decode_s)

    def _counter(self, name: str, text: str) -> Counter:
        series = Counter(name, text, LABELS, registry=self._registry)
        return series.labels(*self._values)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*LABELS, label), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self._registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        series = Histogram(name, text, LABELS, registry=self._registry, buckets=buckets)
        return series.labels(*self._values)

    def _pair(
        self, name: str, text: str, buckets: tuple[float, ...]
    ) -> tuple[Histogram, Histogram]:
        return (
            self._histogram(f"vllm:{name}", text, buckets),
            self._histogram(f"pdserve_{name}", text, buckets),
        )


def _observe(histograms: tuple[Histogram, Histogram], value_s: float) -> None:
    for histogram in histograms:
        histogram.observe(value_s)
