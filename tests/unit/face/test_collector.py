from pdserve.face.collector import WorkerCollector


def test_strangers_at_stages_are_counted_for_the_worker() -> None:
    collector = WorkerCollector("m", "decode-0", "decode")
    collector.num_refused = 3
    found = {
        sample.name: (sample.value, sample.labels["engine"])
        for family in collector.collect()
        for sample in family.samples
    }
    assert found["pdserve_stage_connections_refused_total"] == (3.0, "decode-0")
