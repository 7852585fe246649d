"""Pools of a real cluster on the CPU that grow and shrink under load, and lose no request."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.settings import PoolRange, ScalingSettings
from launcher.scaled_cluster import autoscale_launched
from pdserve.config.worker import FaultConfig
from pdserve.predictor.predictor import MIN_SAMPLES
from pdserve.request import Role
from tests.support.cluster import (
    TEST_ENGINE,
    HarnessClient,
    running_cluster,
    wait_until,
    wait_until_async,
)
from tests.support.models import tiny_llama_folder  # noqa: F401

SETTINGS = ScalingSettings(
    prefill=PoolRange(least=1, most=2),
    decode=PoolRange(least=1, most=2),
    ttft_s=0.6,
    tpot_s=0.5,
    rate_window_s=4.0,
    settle_s=6.0,
    burst_memory_s=0.0,
    confirm_s=1.0,
    shrink_pause_s=1.0,
    catch_up_s=4.0,
    idle_s=8.0,
    queue_tokens=128,
)
SLOW = FaultConfig(step_delay_s=0.25)
"""One prefill replica does not keep up with twelve clients."""
LIGHT_PAUSE_S = 4.0
"""Of one client between two requests: with less, one would wait for another too often."""


async def ask_until(
    client: HarnessClient, stopped: asyncio.Event, number: int, pause_s: float = 0.0
) -> int:
    num_done = 0
    while not stopped.is_set():
        prompt = [3 + (number * 31 + num_done * 7 + i) % 200 for i in range(200)]
        found = await client.generate(prompt_ids=prompt, max_tokens=12, ignore_eos=True)
        assert len(found.token_ids) == 12
        num_done += 1
        if pause_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), pause_s)
    return num_done


def sizes(members: object) -> dict[Role, int]:
    return {
        role: sum(m.role is role and not m.is_draining for m in members)  # type: ignore[attr-defined]
        for role in Role
    }


async def test_C15_pool_grows_and_shrinks_under_load_and_no_request_fails(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    lines: list[str] = []
    # Samples of steps come with heartbeats, two for each look of the controller.
    with running_cluster(tiny_llama_folder, prefill_faults=SLOW, heartbeat_s=0.5) as harness:
        cluster = harness.cluster
        with autoscale_launched(
            cluster, harness.config, SETTINGS, report=lines.append, control_folder=None
        ) as scaled:
            async with harness.connect() as client:
                stopped = asyncio.Event()
                tasks = [asyncio.create_task(ask_until(client, stopped, i)) for i in range(12)]

                async def has_grown() -> bool:
                    serving = [m for m in cluster.members() if m.record is not None]
                    return sum(m.role is Role.PREFILL for m in serving) == 2

                await wait_until_async(has_grown, 60, "prefill has grown")
                # Those that go on see their pool shrink under them.
                few = asyncio.Event()
                light = asyncio.create_task(ask_until(client, few, 99, LIGHT_PAUSE_S))
                stopped.set()
                done = await asyncio.gather(*tasks)
                assert min(done) >= 1

                async def has_shrunk() -> bool:
                    return set(sizes(cluster.members()).values()) == {1}

                await wait_until_async(has_shrunk, 60, "both pools have shrunk")
                few.set()
                assert await light >= 1
                numbers = scaled.controller.numbers
    assert any(line.startswith("prefill: grow 1 -> 2") for line in lines)
    assert any(line.startswith("prefill: shrink 2 -> 1") for line in lines)
    # The law of its class is fitted, from the replicas' own heartbeats.
    fit = numbers[Role.DECODE].fit
    assert fit is not None
    assert fit.worker_class.startswith("cpu ")
    assert fit.num_samples >= MIN_SAMPLES


async def test_pools_go_to_zero_and_the_first_request_brings_them_back(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    settings = ScalingSettings(
        prefill=PoolRange(least=0, most=1), decode=PoolRange(least=0, most=1), idle_s=2.0
    )
    with running_cluster(tiny_llama_folder, can_be_empty=True) as harness:
        cluster = harness.cluster
        with autoscale_launched(
            cluster, harness.config, settings, report=harness.lines.append, control_folder=None
        ):
            wait_until(lambda: cluster.members() == (), 30)
            async with harness.connect() as client:
                # Within the time that a router lets requests wait for workers.
                found = await client.generate(text="hello", max_tokens=4, ignore_eos=True)
                assert len(found.token_ids) == 4


@pytest.mark.soak
@pytest.mark.parametrize("tensor", [1, 2])
async def test_pool_that_starves_gets_a_replica_of_the_other_one_in_place(
    tensor: int,
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    engine = replace(TEST_ENGINE, model=str(tiny_llama_folder), tensor_parallel=tensor)
    settings = replace(SETTINGS, flips_in_place=True, most_in_all=3, tpot_s=2.0)
    lines: list[str] = []
    with running_cluster(
        tiny_llama_folder, engine=engine, num_decode=2, can_flip=True, prefill_faults=SLOW
    ) as harness:
        cluster = harness.cluster
        pids = set(cluster.pids())
        with autoscale_launched(
            cluster, harness.config, settings, report=lines.append, control_folder=None
        ):
            async with harness.connect() as client:
                stopped = asyncio.Event()
                tasks = [asyncio.create_task(ask_until(client, stopped, i)) for i in range(12)]

                async def has_flipped() -> bool:
                    serving = [m for m in cluster.members() if m.record is not None]
                    return sum(m.role is Role.PREFILL for m in serving) == 2

                await wait_until_async(has_flipped, 60, "a decode replica prefills")
                assert set(cluster.pids()) == pids
                stopped.set()
                assert min(await asyncio.gather(*tasks)) >= 1
    assert any(line.startswith("prefill: flip 1 -> 2 without decode-") for line in lines)
