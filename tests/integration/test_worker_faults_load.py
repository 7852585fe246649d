"""Load on pools that are too small, kills at random under load, and what is left after it."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import TEST_ENGINE, ClusterHarness, HarnessClient, running_cluster
from tests.support.faults import (
    SHORT_TIMES,
    Plan,
    Undisturbed,
    incarnations,
    random_plan,
    wait_reborn,
)
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, Resources, assert_ledger

_RNG = random.Random(23)
PLANS = [
    random_plan(_RNG, _RNG.randrange(20, 200), _RNG.randrange(20, 110), is_greedy=number % 2 == 0)
    for number in range(8)
]
NUM_BLOCKS = 40
"""Of 16 tokens: two or three of the plans at a time."""
KV_BLOCK_BYTES = 8192


@pytest.fixture(scope="module")
def tiny(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        max_model_len=512,
        kv_cache_memory_bytes=NUM_BLOCKS * KV_BLOCK_BYTES,
    )
    with running_cluster(
        tiny_llama_folder, engine=engine, num_prefill=2, num_decode=2, **SHORT_TIMES
    ) as harness:
        yield harness


@pytest.fixture(scope="module")
def undisturbed(tiny: ClusterHarness) -> Undisturbed:
    return Undisturbed(tiny)


async def learn(undisturbed: Undisturbed, client: HarnessClient) -> None:
    for plan in PLANS:
        await undisturbed.learn(client, [plan])


async def run_burst(
    client: HarnessClient, undisturbed: Undisturbed, plans: list[Plan]
) -> list[int]:
    """Runs all plans at once, checks them, and returns their numbers of preemptions."""
    found = await asyncio.gather(*(client.generate(plan.request()) for plan in plans))
    for plan, generation in zip(plans, found, strict=True):
        undisturbed.check(plan, generation)
    return [one.timeline.preemptions for one in found if one.timeline is not None]


async def test_B3_burst_over_two_full_pools_ends_with_the_same_tokens(
    tiny: ClusterHarness, undisturbed: Undisturbed
) -> None:
    async with tiny.connect() as client:
        await learn(undisturbed, client)
        canary = await Canary.hatch(tiny, client)
        preemptions = await run_burst(client, undisturbed, PLANS * 5)
        refused = [
            tiny.scrape_worker(name)["pdserve_handoffs_refused_total"]
            for name in ("decode-0", "decode-1")
        ]
        assert sum(preemptions) + sum(refused) > 0, "the pools were never full"
        await assert_ledger(client, 4)
        await canary.assert_alive(client)


async def kill_at_random(
    tiny: ClusterHarness, undisturbed: Undisturbed, num_kills: int, seed: int
) -> None:
    """Keeps bursts coming while workers are killed one after another."""
    rng = random.Random(seed)
    async with tiny.connect() as client:
        await learn(undisturbed, client)
        canary = await Canary.hatch(tiny, client)
        for _ in range(num_kills):
            tiny.wait_all_registered()
            before = incarnations(tiny)
            worker_id = rng.choice(sorted(before))
            burst = asyncio.ensure_future(run_burst(client, undisturbed, rng.choices(PLANS, k=12)))
            await asyncio.sleep(rng.uniform(0.02, 0.6))
            which = rng.choice(("face", "rank"))
            signal_number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            tiny.cluster.kill(worker_id, which, signal_number)  # type: ignore[arg-type]
            await burst
            await wait_reborn(tiny, worker_id, before[worker_id])
        await assert_ledger(client, 4)
        await canary.assert_alive(client, num_expected_restarts=num_kills)


async def test_G1_kills_under_pressure_lose_nothing(
    tiny: ClusterHarness, undisturbed: Undisturbed
) -> None:
    await kill_at_random(tiny, undisturbed, num_kills=2, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 104))
async def test_G1_kills_under_pressure_lose_nothing_for_long(
    tiny: ClusterHarness, undisturbed: Undisturbed, seed: int
) -> None:
    await kill_at_random(tiny, undisturbed, num_kills=60, seed=seed)


async def serve_many(client: HarnessClient, num_requests: int) -> None:
    """Runs many short requests, eight at a time."""
    plans = [replace(plan, max_tokens=6) for plan in PLANS]
    for _ in range(0, num_requests, len(plans)):
        await asyncio.gather(*(client.generate(plan.request()) for plan in plans))


def survivors(tiny: ClusterHarness) -> list[int]:
    """Returns router, prefill-0 and decode-0 with their ranks: nobody kills them here."""
    found = [tiny.cluster.router_pid]
    for worker_id in ("prefill-0", "decode-0"):
        member = tiny.cluster.member(worker_id)
        assert member.record is not None
        found += [member.face_pid, *member.record.rank_pids]
    return [pid for pid in found if pid is not None]


async def grow(tiny: ClusterHarness, num_requests: int, num_kills: int) -> None:
    """Compares what the surviving processes hold before and after requests and kills."""
    tiny.wait_all_registered()
    async with tiny.connect() as client:
        await serve_many(client, 48)
        await assert_ledger(client, 4)
        pids = survivors(tiny)
        before = Resources.of(pids)
        for number in range(num_kills):
            lives = incarnations(tiny)
            worker_id = ("prefill-1", "decode-1")[number % 2]
            load = asyncio.ensure_future(serve_many(client, num_requests // num_kills))
            await asyncio.sleep(0.1)
            tiny.cluster.kill(worker_id)
            await load
            await wait_reborn(tiny, worker_id, lives[worker_id])
        await assert_ledger(client, 4)
        # Links and channels to the last lives of the killed ones stay, those to earlier ones go.
        Resources.of(pids).assert_no_growth(before, rss_bytes=64 << 20, num_fds=16, num_threads=12)
        assert len({os.getpgid(pid) for pid in pids}) == len(pids), "a survivor was replaced"


async def test_BOUND_two_hundred_requests_and_kills_leave_no_growth(tiny: ClusterHarness) -> None:
    await grow(tiny, num_requests=200, num_kills=2)


@pytest.mark.soak
async def test_BOUND_many_requests_and_kills_leave_no_growth(tiny: ClusterHarness) -> None:
    await grow(tiny, num_requests=20_000, num_kills=60)
