"""Redis killed, stopped and flushed, and the router killed: the cluster serves on."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from autoscaler.settings import PoolRange, ScalingSettings
from launcher.scaled_cluster import autoscale_launched
from pdserve.request import Role
from tests.support.cluster import ClusterHarness, running_cluster, wait_until_async
from tests.support.faults import (
    SHORT_TIMES,
    SLOW_DECODE,
    Undisturbed,
    incarnations,
    random_plan,
    start_all,
    wait_for,
)
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger

_RNG = random.Random(5)
PLANS = [random_plan(_RNG, 100, 60, is_greedy=number % 2 == 0) for number in range(4)]
LONG = random_plan(_RNG, 100, 800, is_greedy=True)
NUM_WORKERS = 2


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    with running_cluster(tiny_llama_folder, decode_faults=SLOW_DECODE, **SHORT_TIMES) as harness:
        yield harness


@pytest.fixture(scope="module")
def undisturbed(cluster: ClusterHarness) -> Undisturbed:
    return Undisturbed(cluster)


async def num_registered(cluster: ClusterHarness) -> int:
    async with Redis.from_url(cluster.cluster.redis_url) as redis:
        return len(await redis.keys("pdserve:*:worker:*"))


async def serve_through(
    cluster: ClusterHarness, undisturbed: Undisturbed, break_redis: Callable[[], Awaitable[None]]
) -> None:
    """Runs streams through a fault of Redis and begins others while it lasts."""
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        await undisturbed.learn(client, PLANS)
        canary = await Canary.hatch(cluster, client)
        lives = incarnations(cluster)
        early = start_all(client, PLANS)
        await wait_for(lambda: all(s.num_tokens > 3 for s in early), 30.0, "all streams run")
        await break_redis()
        late = start_all(client, PLANS)
        for stream in (*early, *late):
            generation = await stream.end()
            undisturbed.check(stream.plan, generation)
            assert generation.timeline is not None
            assert generation.timeline.attempts == 1
        await assert_ledger(client, NUM_WORKERS)
        await canary.assert_alive(client)
        cluster.wait_all_registered()
        assert incarnations(cluster) == lives


async def test_C18_flushed_redis_is_filled_again_within_a_heartbeat(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    async def flush() -> None:
        async with Redis.from_url(cluster.cluster.redis_url) as redis:
            await redis.flushall()

        async def are_back() -> bool:
            return await num_registered(cluster) == NUM_WORKERS

        # Before anybody would miss them.
        limit_s = cluster.config.registry_lease_s
        await wait_until_async(are_back, limit_s, "all workers are registered again")

    await serve_through(cluster, undisturbed, flush)


async def test_C18_killed_redis_fails_no_request_and_comes_back(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    redis = cluster.cluster.redis
    assert redis is not None
    pid = redis.pid
    assert pid is not None

    async def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    await serve_through(cluster, undisturbed, kill)
    assert redis.pid != pid
    assert await num_registered(cluster) == NUM_WORKERS


async def test_C18_stopped_redis_fails_no_request_for_longer_than_a_lease(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    redis = cluster.cluster.redis
    assert redis is not None
    pid = redis.pid
    assert pid is not None

    async def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * cluster.config.registry_lease_s)
        # The late requests begin while it still sleeps.
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)

    try:
        await serve_through(cluster, undisturbed, stop)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_killed_router_leaves_no_orphan_and_its_successor_serves(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        await undisturbed.learn(client, PLANS)
        await client.wait_idle()
        lives, router_pid = incarnations(cluster), cluster.cluster.router_pid
        # Far longer than the grace: it would not end by itself in the time that the ledger has.
        streams = start_all(client, [*PLANS, LONG])
        await wait_for(lambda: all(s.num_tokens > 3 for s in streams), 30.0, "all streams run")
        cluster.cluster.kill_router()
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stream.end()
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        await wait_for(
            lambda: cluster.cluster.router_pid not in (None, router_pid), 30.0, "a new router"
        )
    async with cluster.connect() as client:

        async def serves() -> bool:
            try:
                return len(await client.loads()) == NUM_WORKERS
            except grpc.aio.AioRpcError:
                return False

        await wait_until_async(serves, 60.0, "the new router serves")
        undisturbed.check(PLANS[0], await client.generate(PLANS[0].request()))
        await assert_ledger(client, NUM_WORKERS, timeout_s=cluster.config.orphan_grace_s + 2.0)
        assert incarnations(cluster) == lives


async def test_C18_pools_hold_their_sizes_while_redis_is_killed_in_the_middle_of_a_start(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    cluster.wait_all_registered()
    redis, pools = cluster.cluster.redis, cluster.cluster
    assert redis is not None
    lines: list[str] = []
    bounds = PoolRange(least=1, most=3)
    # It would be quick to shrink, and to take a replica that is not heard of for a lost one.
    settings = ScalingSettings(
        prefill=bounds, decode=bounds, settle_s=3.0, shrink_pause_s=0.5, lost_s=5.0, idle_s=3.0
    )

    def num_ready(role: Role) -> int:
        return sum(m.role is role and m.record is not None for m in pools.members())

    def sizes() -> dict[Role, int]:
        members = [m for m in pools.members() if not m.is_draining]
        return {role: sum(m.role is role for m in members) for role in Role}

    with autoscale_launched(
        pools, cluster.config, settings, report=lines.append, control_folder=None
    ) as scaled:
        async with cluster.connect() as client:
            await undisturbed.learn(client, PLANS)
            controller = scaled.controller
            lives = incarnations(cluster)
            streams = start_all(client, PLANS)
            await wait_for(lambda: all(s.num_tokens > 3 for s in streams), 30.0, "all run")
            controller.set_ranges(None, PoolRange(least=2, most=3))
            await wait_for(lambda: sizes()[Role.DECODE] == 2, 30.0, "a replica starts")
            pid = redis.pid
            assert pid is not None
            # Away while the new one gets ready, and then back without anything in it.
            os.kill(pid, signal.SIGSTOP)
            for _ in range(20):
                await asyncio.sleep(2 * cluster.config.registry_lease_s / 20)
                assert sizes() == {Role.PREFILL: 1, Role.DECODE: 2}
            streams += start_all(client, PLANS)
            os.kill(pid, signal.SIGKILL)
            await wait_for(lambda: num_ready(Role.DECODE) == 2, 40.0, "it has joined")
            for stream in streams:
                undisturbed.check(stream.plan, await stream.end())
            now = incarnations(cluster)
            assert {name: now[name] for name in lives} == lives
            assert len(lines) == 1, lines
            assert lines[0].startswith("decode: grow 1 -> 2: below its range")
            # As it was, for whoever comes next.
            controller.set_ranges(None, PoolRange(least=1, most=1))
            await wait_for(lambda: len(pools.members()) == NUM_WORKERS, 40.0, "one has left")
