"""Routers know what real workers cache: told of it while it happens, or by a snapshot later."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cache.granule_hash import GRANULE_TOKENS, hash_granules
from pdserve.registry.redis import RedisRegistry
from pdserve.request import FrontId
from pdserve.rpc.v1 import worker_pb2
from pdserve.timeline import MonotonicClock
from router.cache_watch import CacheWatch
from router.fleet import Fleet
from router.load_book import LoadBook
from router.policy import WorkerKey
from router.prefix_index import PrefixIndex
from router.worker_pool import WorkerPool
from tests.support.cluster import TEST_ENGINE, ClusterHarness, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.router_harness import eventually

NAME = "cache-events"
NUM_BLOCKS = 48
"""Six granules."""
KV_BLOCK_BYTES = 8192
"""Of the tiny Llama: 2 x 2 layers x 2 heads x 16 x 4 bytes x 16 slots."""


class Nobody:
    """Listens to a pool that serves no requests."""

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        pass

    def on_worker_lost(self, worker: WorkerKey, why: str) -> None:
        pass

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        return []


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        max_model_len=NUM_BLOCKS * 16,
        kv_cache_memory_bytes=NUM_BLOCKS * KV_BLOCK_BYTES,
    )
    with running_cluster(
        tiny_llama_folder, name=NAME, engine=engine, num_prefill=1, num_decode=1
    ) as harness:
        yield harness


@asynccontextmanager
async def new_router(cluster: ClusterHarness) -> AsyncIterator[PrefixIndex]:
    """Follows the workers' caches, as one more router does."""
    clock, index = MonotonicClock(), PrefixIndex()
    async with RedisRegistry(cluster.cluster.redis_url, NAME) as registry:
        pool = WorkerPool(
            registry,
            FrontId("new"),
            LoadBook(Fleet(3.0), clock),
            clock,
            silence_s=5.0,
            max_message_bytes=1 << 24,
        )
        pool.listen(Nobody())
        await pool.poll()
        watch = CacheWatch(pool, index, FrontId("new"))
        task = asyncio.create_task(watch.run())
        try:
            yield index
        finally:
            task.cancel()
            await asyncio.wait((task,))
            await pool.close()


async def test_C12_an_evicted_prefix_is_known_to_no_router_and_a_new_one_learns_what_is_cached(
    cluster: ClusterHarness,
):
    def prompt(first: int) -> tuple[int, ...]:
        return tuple(first + i % 7 for i in range(3 * GRANULE_TOKENS + 3))

    old, keys = prompt(10), hash_granules(prompt(10))
    async with cluster.connect() as client, new_router(cluster) as index:
        await client.generate(prompt_ids=old, max_tokens=4, temperature=0.0, ignore_eos=True)
        await eventually(lambda: sorted(index.match(keys).values()) == [3, 3])
        async with new_router(cluster) as later:
            await eventually(lambda: later.match(keys) == index.match(keys), timeout_s=20.0)
        for first in (40, 70, 100):
            await client.generate(
                prompt_ids=prompt(first), max_tokens=4, temperature=0.0, ignore_eos=True
            )
        await eventually(lambda: index.match(keys) == {})
        newest = hash_granules(prompt(100))
        await eventually(lambda: sorted(index.match(newest).values()) == [3, 3])
        async with new_router(cluster) as later:
            await eventually(lambda: later.match(newest) == index.match(newest), timeout_s=20.0)
            assert later.match(keys) == {}
