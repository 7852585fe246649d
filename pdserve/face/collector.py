"""Worker metrics, made from the rank's latest heartbeat at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.config.worker import TRANSPORTS
from pdserve.rpc.v1 import rank_pb2

_LABELS = ("model_name", "engine", "role")


class WorkerCollector(Collector):
    """Yields native `pdserve_` series and those `vllm:` names that dashboards query."""

    def __init__(self, model_name: str, worker_id: str, role: str) -> None:
        """Labels are fixed at start, so the number of series never grows."""
        self._values = (model_name, worker_id, role)
        self._heartbeat = rank_pb2.RankHeartbeat()
        self.num_refused = 0
        """Connections that the holders of this worker's stages have refused."""

    def observe(self, heartbeat: rank_pb2.RankHeartbeat) -> None:
        """Takes the figures to show from now on."""
        self._heartbeat = heartbeat

    def collect(self) -> Iterator[Metric]:
        """Yields every series once."""
        for name, text, value in self._gauges():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        yield from self._links()
        for name, text, value in self._counters():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._values, value)
            yield counter

    def _links(self) -> Iterator[Metric]:
        links = self._heartbeat.links
        labels = (*_LABELS, "transport")
        live = GaugeMetricFamily("pdserve_links", "Live links of rank 0.", labels=labels)
        for transport in TRANSPORTS:
            count = sum(link.transport == transport for link in links)
            live.add_metric((*self._values, transport), count)
        yield live
        text = "Live links of rank 0 for which a preferred transport did not come up."
        fallen = GaugeMetricFamily("pdserve_links_fallen_back", text, labels=_LABELS)
        fallen.add_metric(self._values, sum(bool(link.failures) for link in links))
        yield fallen

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        load = self._heartbeat.load
        ledger = self._heartbeat.ledger
        used = load.total_blocks - load.free_blocks - load.cached_blocks
        share = used / load.total_blocks if load.total_blocks else 0.0
        yield "vllm:num_requests_running", "Sequences being computed.", load.num_running
        yield "vllm:num_requests_waiting", "Requests in the queue.", load.num_waiting
        yield "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", share
        yield "vllm:gpu_cache_usage_perc", "Old name of vllm:kv_cache_usage_perc.", share
        yield "pdserve_kv_blocks_total", "KV blocks of this worker.", load.total_blocks
        yield "pdserve_kv_blocks_free", "KV blocks that hold nothing.", load.free_blocks
        yield "pdserve_kv_blocks_cached", "KV blocks kept for reuse only.", load.cached_blocks
        yield "pdserve_kv_blocks_reserved", "KV blocks promised to hand-offs.", load.reserved_blocks
        yield "pdserve_queued_tokens", "Tokens waiting to be computed.", load.queued_tokens
        yield "pdserve_handoffs_in_flight", "Hand-offs under way.", ledger.transfers
        yield "pdserve_reservations", "Reservations that hold blocks.", ledger.reservations
        yield "pdserve_handoffs_held", "Computed requests whose KV waits.", ledger.held_handoffs

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        counters = self._heartbeat.counters
        hits, queries = counters.prefix_cache_hits, counters.prefix_cache_queries
        recomputed = counters.recomputed_prompt_tokens
        local = counters.local_prefill_tokens
        yield "vllm:prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens
        yield "vllm:generation_tokens", "Tokens generated.", counters.generation_tokens
        yield "vllm:num_preemptions", "Sequences preempted.", counters.preemptions
        yield "vllm:prefix_cache_queries", "Prompt tokens looked up.", queries
        yield "vllm:prefix_cache_hits", "Prompt tokens found cached.", hits
        yield "pdserve_recomputed_prompt_tokens", "Computed on decode, not handed off.", recomputed
        yield "pdserve_local_prefill_tokens", "Computed on decode by the router's choice.", local
        yield "pdserve_handoffs_completed", "Hand-offs landed.", counters.handoffs_completed
        yield "pdserve_handoffs_failed", "Hand-offs aborted.", counters.handoffs_failed
        yield "pdserve_handoffs_refused", "Reservations refused.", counters.handoffs_refused
        yield "pdserve_handoff_bytes", "KV bytes handed off.", counters.handoff_bytes
        yield "pdserve_handoff_seconds", "Seconds spent in hand-offs.", counters.handoff_seconds
        yield "pdserve_leases_expired", "Leases that ran out.", counters.leases_expired
        yield "pdserve_stale_refused", "Messages of fenced attempts.", counters.stale_refused
        yield "pdserve_frames_rejected", "Frames that failed a check.", counters.frames_rejected
        yield "pdserve_stage_connections_refused", "Strangers at stages.", self.num_refused
        yield "pdserve_steps", "Engine steps.", counters.steps
        yield "pdserve_step_seconds", "Seconds spent in engine steps.", counters.step_seconds
