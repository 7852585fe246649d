"""A front that follows its workers' caches over gRPC: breaks, gaps, deaths, restarts."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from pdserve.cache.cache_events import CacheEventLog
from pdserve.cache.cached_granules import GranuleChange
from pdserve.cache.granule_hash import hash_granules
from pdserve.face.cache_streams import encode_piece
from pdserve.request import FrontId, Incarnation, Role, WorkerId
from pdserve.rpc.v1 import worker_pb2
from router.cache_watch import CacheWatch
from router.event_queue import MAX_BATCH, EventQueue
from router.policy import WorkerKey
from router.prefix_index import PrefixIndex
from router.worker_pool import WorkerPool
from tests.support.fake_script import Script
from tests.support.fake_worker import FakeWorker
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
    worker.cache.is_told = True
    return worker


def _holds(cluster: Cluster, expected: dict[str, int]) -> bool:
    return cluster.brain.index.match(KEYS) == expected


async def test_what_a_worker_caches_and_evicts_is_known_to_the_router(cluster: Cluster):
    worker = await _add(cluster)
    worker.cache.change(*KEYS[:2])
    await eventually(lambda: _holds(cluster, {"d0": 2}))
    worker.cache.change(KEYS[2])
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    worker.cache.change(KEYS[2], KEYS[1], is_removed=True)
    await eventually(lambda: _holds(cluster, {"d0": 1}))


async def test_C12_a_broken_stream_goes_on_where_it_stood(cluster: Cluster):
    worker = await _add(cluster)
    worker.cache.change(*KEYS[:2])
    await eventually(lambda: _holds(cluster, {"d0": 2}))
    worker.cache.break_streams()
    worker.cache.change(KEYS[2])
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    assert [request.next_sequence for request in worker.cache.requests] == [0, 3]


async def test_C12_events_that_are_gone_for_good_are_made_up_by_a_snapshot(cluster: Cluster):
    worker = await _add(cluster)
    worker.cache.change(*KEYS[:2])
    await eventually(lambda: _holds(cluster, {"d0": 2}))
    worker.cache.break_streams()
    worker.cache.log.clear()
    worker.cache.change(KEYS[0])
    await eventually(lambda: _holds(cluster, {"d0": 1}))


async def test_a_dead_worker_is_forgotten_and_its_next_life_begins_with_nothing(cluster: Cluster):
    worker = await _add(cluster)
    worker.cache.change(*KEYS)
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    await worker.die()
    await eventually(lambda: _holds(cluster, {}))
    again = await _add(cluster, incarnation=77)
    again.cache.change(KEYS[0])
    await eventually(lambda: _holds(cluster, {"d0": 1}))


async def test_the_index_shows_in_the_metrics(cluster: Cluster):
    worker = await _add(cluster)
    worker.cache.change(*KEYS)
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
    worker.cache.is_told = False
    await cluster.ready(1)
    await eventually(lambda: bool(worker.cache.requests))
    await generate(cluster, request_for(LONG_PROMPT))
    assert _holds(cluster, {"d0": 3})
    assert not cluster.brain.index.is_watched(worker.key.worker_id)


async def test_what_was_just_placed_counts_before_the_worker_has_told_of_it(cluster: Cluster):
    worker = await _add(cluster)
    await eventually(lambda: cluster.brain.index.is_watched(worker.key.worker_id))
    await generate(cluster, request_for(LONG_PROMPT))
    assert _holds(cluster, {"d0": 3})
    worker.cache.change(*KEYS)
    worker.cache.change(*KEYS[::-1], is_removed=True)
    await eventually(lambda: _holds(cluster, {}))


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.soak)])
async def test_C12_each_of_many_routers_in_a_row_learns_all_at_once(text_folder: Path, count: int):
    async with run_cluster(text_folder) as first:
        worker = await _add(first)
        worker.cache.change(*KEYS)
        await eventually(lambda: _holds(first, {"d0": 3}))
        for _ in range(count):
            async with run_cluster(text_folder) as cluster:
                await cluster.registry.register(worker.record(), lease_s=60)
                await cluster.ready(1)
                await eventually(lambda: _holds(cluster, {"d0": 3}), timeout_s=5.0)


async def test_C12_requests_are_served_while_the_events_of_all_workers_fail(cluster: Cluster):
    worker = await _add(cluster)
    worker.cache.change(*KEYS)
    await eventually(lambda: _holds(cluster, {"d0": 3}))
    for _ in range(5):
        worker.cache.break_streams()
        await let_others_run(3)
        result = await generate(cluster, request_for(LONG_PROMPT))
        assert result.error is None
    await eventually(lambda: len(worker.cache.requests) > 1)


class Told:
    """What one worker tells in one stream: its snapshot, then nothing any more."""

    def __init__(self, batches: list[worker_pb2.CacheBatch]) -> None:
        self._batches = batches

    async def __aiter__(self) -> AsyncIterator[worker_pb2.CacheBatch]:
        for batch in self._batches:
            yield batch
        await asyncio.Event().wait()

    def cancel(self) -> None: ...


@dataclass
class Link:
    """A worker that has cached some granules before the router came."""

    key: WorkerKey
    num_keys: int
    is_alive: bool = True
    is_lost: bool = False

    def watch_cache(self, request: worker_pb2.WatchCacheRequest) -> Told:
        log = CacheEventLog()
        first = (1 << 20) * (1 + int(self.key.worker_id))
        log.append([GranuleChange(key, False) for key in range(first, first + self.num_keys)])
        return Told([encode_piece(self.key.incarnation, piece) for piece in log.snapshot()])


class Pool:
    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def links(self) -> list[Link]:
        return self._links

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


async def test_many_workers_that_tell_all_they_have_fill_the_queue_to_its_limit_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
):
    num_workers, num_keys = 60, 9000
    links = [
        Link(WorkerKey(WorkerId(str(n)), Incarnation(1)), num_keys) for n in range(num_workers)
    ]
    index = PrefixIndex()
    watch = CacheWatch(cast(WorkerPool, Pool(links)), index, FrontId("f"))
    waiting, taken = [], []
    flush = EventQueue.flush

    def count(queue: EventQueue) -> None:
        waiting.append(queue.num_waiting)
        flush(queue)
        taken.append(waiting[-1] - queue.num_waiting)

    monkeypatch.setattr(EventQueue, "flush", count)
    task = asyncio.create_task(watch.run())
    await eventually(lambda: len(index) == num_workers * num_keys, timeout_s=20.0)
    task.cancel()
    await asyncio.wait([task])
    # A message may come on top, and that it is a whole one is the sender's choice.
    assert max(waiting) <= (1 << 16) + 4096
    assert max(taken) <= MAX_BATCH
    assert watch.num_fed == num_workers
