from prometheus_client.core import Metric

from pdserve.face.collector import WorkerCollector
from pdserve.rpc.v1 import inference_pb2, rank_pb2


def samples_of(collector: WorkerCollector, name: str) -> dict[str, float]:
    (metric,) = (one for one in collector.collect() if one.name == name)
    assert isinstance(metric, Metric)
    return {sample.labels.get("transport", ""): sample.value for sample in metric.samples}


def link(transport: str, *failures: str) -> inference_pb2.LinkInfo:
    return inference_pb2.LinkInfo(transport=transport, failures=failures)


def test_links_are_counted_by_transport_and_by_what_they_fell_back_from() -> None:
    collector = WorkerCollector("m", "p0", "prefill")
    links = [link("push"), link("push"), link("gloo", "push: out of memory", "nccl: none")]
    collector.observe(rank_pb2.RankHeartbeat(links=links))
    assert samples_of(collector, "pdserve_links") == {"push": 2, "nccl": 0, "gloo": 1}
    assert samples_of(collector, "pdserve_links_fallen_back") == {"": 1}


def test_every_series_is_there_before_the_first_heartbeat_and_once() -> None:
    names = [metric.name for metric in WorkerCollector("m", "p0", "prefill").collect()]
    assert len(names) == len(set(names))
    assert "pdserve_links" in names


def test_strangers_at_stages_are_counted_for_the_worker() -> None:
    collector = WorkerCollector("m", "decode-0", "decode")
    collector.num_refused = 3
    found = {
        sample.name: (sample.value, sample.labels["engine"])
        for family in collector.collect()
        for sample in family.samples
    }
    assert found["pdserve_stage_connections_refused_total"] == (3.0, "decode-0")
