import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Summary,
    generate_latest,
)

from pdserve.exposition import TextExposition, join_expositions


def test_an_empty_registry_has_no_text():
    assert TextExposition(CollectorRegistry()).generate() == b""


@pytest.mark.parametrize("label", ["plain", 'a"b', "back\\slash", "two\nlines", "ünïcode", ""])
def test_every_kind_of_series_is_written_as_the_client_library_writes_it(label):
    registry = CollectorRegistry()
    Counter("pd:things", 'Things, "quoted" \\ and\nbroken.', ("b", "a"), registry=registry).labels(
        label, "1"
    ).inc(1e9)
    gauge = Gauge("pd_level", "Level.", registry=registry)
    histogram = Histogram("pd_wait", "Wait.", ("a",), registry=registry, buckets=(0.1, 2.5e7))
    Summary("pd_size", "Size.", registry=registry).observe(3)
    Info("pd_build", "Build.", registry=registry).info({"version": label})
    exposition = TextExposition(registry)
    for value in (0.0, 1e-9, 123456789.0, float("inf"), float("-inf"), float("nan")):
        gauge.set(value)
        histogram.labels(label).observe(value)
        assert exposition.generate() == generate_latest(registry)


def test_a_series_that_is_added_later_is_shown():
    registry = CollectorRegistry()
    counter = Counter("pd_things", "Things.", ("a",), registry=registry)
    exposition = TextExposition(registry)
    assert b"pd_things_total{" not in exposition.generate()
    counter.labels("x").inc()
    assert b'pd_things_total{a="x"} 1.0' in exposition.generate()


def _registry(*engines):
    registry = CollectorRegistry()
    waits = Histogram("pd_wait", "Wait\nhere.", ("engine",), registry=registry, buckets=(1.0,))
    level = Gauge("pd_level", "Level.", ("engine",), registry=registry)
    for engine in engines:
        waits.labels(engine).observe(0.5)
        level.labels(engine).set(2)
    return registry


def _without_times(text):
    return [line for line in text.splitlines() if "_created{" not in line]


def test_the_texts_of_several_processes_are_joined_as_if_they_were_one():
    texts = [TextExposition(_registry(name)).generate().decode() for name in ("0", "1")]
    whole = TextExposition(_registry("0", "1")).generate().decode()
    assert _without_times(join_expositions(texts)) == _without_times(whole)


def test_a_metric_that_only_one_process_has_is_shown_once():
    registry = CollectorRegistry()
    Counter("pd_own", "Own.", registry=registry).inc()
    own = TextExposition(registry).generate().decode()
    other = TextExposition(_registry("0")).generate().decode()
    assert join_expositions([other, own, ""]) == other + own
