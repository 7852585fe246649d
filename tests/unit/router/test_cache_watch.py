"""A front that follows its workers' caches over gRPC: breaks, gaps, deaths, restarts."""

from pathlib import Path

import pytest

from pdserve.cache.granule_hash import hash_granules
from pdserve.request import Role
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_harness import (
    Cluster,
    eventually,
    generate,
    let_others_run,
    request_for,
    run_cluster,
)

LONG_PROMPT = tuple(10 + i % 200 for i in range(3 * 128 + 5))
KEYS = hash_granules(LONG_PROMPT)


async def _add(cluster: Cluster, worker_id: str = "d0", **over: object) -> FakeWorker:
    worker = await cluster.network.start(worker_id, Role.DECODE, Script(), **over)
    worker.tells_cache = True
    return worker


def _holds(cluster: Cluster, expected: dict[str, int]) -> bool:
    return cluster.brain.index.match(KEYS) == expected


async def test_what_a_worker_caches_and_evicts_is_known_to_the_router(cluster: Cluster):
    worker = await _add(cluster)
    worker.change_cache(*KEYS[:2])
    await eventually(lambda: _holds(cluster, {"d0": 2}))
    worker.change_cache(KEYS[2])
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    worker.change_cache(KEYS[2], KEYS[1], is_removed=True)
    await eventually(lambda: _holds(cluster, {"d0": 1}))


async def test_C12_a_broken_stream_goes_on_where_it_stood(cluster: Cluster):
    worker = await _add(cluster)
    worker.change_cache(*KEYS[:2])
    await eventually(lambda: _holds(cluster, {"d0": 2}))
    worker.break_cache_streams()
    worker.change_cache(KEYS[2])
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    assert [request.next_sequence for request in worker.cache_requests] == [0, 3]


async def test_C12_events_that_are_gone_for_good_are_made_up_by_a_snapshot(cluster: Cluster):
    worker = await _add(cluster)
    worker.change_cache(*KEYS[:2])
    await eventually(lambda: _holds(cluster, {"d0": 2}))
    worker.break_cache_streams()
    worker.cache_log.clear()
    worker.change_cache(KEYS[0])
    await eventually(lambda: _holds(cluster, {"d0": 1}))


async def test_a_dead_worker_is_forgotten_and_its_next_life_begins_with_nothing(cluster: Cluster):
    worker = await _add(cluster)
    worker.change_cache(*KEYS)
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    await worker.die()
    await eventually(lambda: _holds(cluster, {}))
    again = await _add(cluster, incarnation=77)
    again.change_cache(KEYS[0])
    await eventually(lambda: _holds(cluster, {"d0": 1}))


async def test_the_index_shows_in_the_metrics(cluster: Cluster):
    worker = await _add(cluster)
    worker.change_cache(*KEYS)
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    shown = {
        sample.name: sample.value
        for family in cluster.front.metrics_registry.collect()
        for sample in family.samples
        if sample.name.startswith("pdserve_index")
    }
    assert (shown["pdserve_index_pairs"], shown["pdserve_index_watched"]) == (3, 1)
    assert shown["pdserve_index_bytes"] > 0
    assert shown["pdserve_index_gaps_total"] == 0


async def test_a_worker_without_events_is_known_from_placements(cluster: Cluster):
    worker = await _add(cluster)
    worker.tells_cache = False
    await cluster.ready(1)
    await eventually(lambda: bool(worker.cache_requests))
    await generate(cluster, request_for(LONG_PROMPT))
    assert _holds(cluster, {"d0": 3})
    assert not cluster.brain.index.is_watched(worker.key.worker_id)


async def test_what_was_just_placed_counts_before_the_worker_has_told_of_it(cluster: Cluster):
    worker = await _add(cluster)
    await eventually(lambda: cluster.brain.index.is_watched(worker.key.worker_id))
    await generate(cluster, request_for(LONG_PROMPT))
    assert _holds(cluster, {"d0": 3})
    worker.change_cache(*KEYS)
    worker.change_cache(*KEYS[::-1], is_removed=True)
    await eventually(lambda: _holds(cluster, {}))


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.soak)])
async def test_C12_each_of_many_routers_in_a_row_learns_all_at_once(text_folder: Path, count: int):
    async with run_cluster(text_folder) as first:
        worker = await _add(first)
        worker.change_cache(*KEYS)
        await eventually(lambda: _holds(first, {"d0": 3}))
        for _ in range(count):
            async with run_cluster(text_folder) as cluster:
                await cluster.registry.register(worker.record(), lease_s=60)
                await cluster.ready(1)
                await eventually(lambda: _holds(cluster, {"d0": 3}), timeout_s=5.0)


async def test_C12_requests_are_served_while_the_events_of_all_workers_fail(cluster: Cluster):
    worker = await _add(cluster)
    worker.change_cache(*KEYS)
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    for _ in range(5):
        worker.break_cache_streams()
        await let_others_run(3)
        result = await generate(cluster, request_for(LONG_PROMPT))
        assert result.error is None
    await eventually(lambda: len(worker.cache_requests) > 1)
