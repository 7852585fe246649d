"""Replicas of several ranks that change their pool together, weights loaded, on real processes."""

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.pool import Member
from pdserve.config.worker import FaultConfig
from pdserve.errors import ConfigError
from pdserve.process import is_running
from pdserve.registry.base import WorkerRecord
from pdserve.request import Role
from tests.support.cluster import (
    TEST_ENGINE,
    ClusterHarness,
    running_cluster,
    wait_until_async,
)
from tests.support.faults import Plan, Stream, Undisturbed
from tests.support.flips import RequestStream, flip, wait_role, wait_works_as
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger

PLANS = (
    Plan(prompt_ids=tuple(3 + (7 * i) % 200 for i in range(90)), max_tokens=24),
    Plan(prompt_ids=tuple(5 + (11 * i) % 300 for i in range(150)), max_tokens=30),
    Plan(prompt_ids=tuple(range(20, 60)), max_tokens=24, temperature=0.9, seed=11),
)
NUM_CLIENTS = 3
SLOW = FaultConfig(step_delay_s=0.05)
FAIRLY_LONG = Plan(prompt_ids=PLANS[0].prompt_ids, max_tokens=80)
LONG = Plan(prompt_ids=PLANS[0].prompt_ids, max_tokens=600)
RESTART_TIMEOUT_S = 60.0


def of_ranks(folder: Path, tensor: int, stages: int) -> dict[str, object]:
    """Fields of ClusterConfig: replicas of so many ranks that can flip."""
    engine = replace(
        TEST_ENGINE, model=str(folder), tensor_parallel=tensor, pipeline_parallel=stages
    )
    return {"engine": engine, "can_flip": True, "max_local_prefill_tokens": 0}


def record_of(member: Member) -> WorkerRecord:
    assert member.record is not None
    return member.record


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [pytest.param(2, 1, id="TP2"), pytest.param(1, 2, id="PP2", marks=pytest.mark.soak)],
)
async def test_all_ranks_change_their_pool_and_back_under_traffic_and_no_token_changes(
    tensor: int,
    stages: int,
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(
        tiny_llama_folder, num_prefill=2, **of_ranks(tiny_llama_folder, tensor, stages)
    ) as harness:
        async with harness.connect() as client:
            known = Undisturbed(harness)
            await known.learn(client, PLANS)
            canary = await Canary.hatch(harness, client)
            async with RequestStream(client, known, PLANS, NUM_CLIENTS) as stream:
                was, now = await flip(harness, "prefill-1", Role.DECODE)
                await wait_works_as(client, "prefill-1", Role.DECODE)
                _, back = await flip(harness, "prefill-1", Role.PREFILL)
                await wait_works_as(client, "prefill-1", Role.PREFILL)
                await stream.wait_more(NUM_CLIENTS)
            # The very same processes, each time as somebody else.
            lives = [record_of(member) for member in (was, now, back)]
            assert len(lives[0].rank_pids) == 2
            assert {life.rank_pids for life in lives} == {lives[0].rank_pids}
            assert {life.face_pid for life in lives} == {lives[0].face_pid}
            assert len({life.incarnation for life in lives}) == 3
            await assert_ledger(client, 3)
            await canary.assert_alive(client)
        # A cluster that stops does not wait for somebody to come back.
        harness.cluster.flip("prefill-1", Role.DECODE)
    assert not [line for line in harness.lines if "killing it" in line]


@pytest.mark.parametrize(
    "victim", [0, pytest.param(1, marks=pytest.mark.soak)], ids=["rank 0", "rank 1"]
)
async def test_rank_killed_between_two_roles_brings_the_replica_back_in_the_ordered_one(
    victim: int,
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(
        tiny_llama_folder, num_prefill=2, **of_ranks(tiny_llama_folder, 2, 1)
    ) as harness:
        async with harness.connect() as client:
            known = Undisturbed(harness)
            await known.learn(client, PLANS)
            canary = await Canary.hatch(harness, client)
            was = harness.cluster.member("prefill-1")
            pids = await _flip_until_between_roles(harness, "prefill-1")
            async with RequestStream(client, known, PLANS, NUM_CLIENTS) as stream:
                os.kill(pids[victim], signal.SIGKILL)
                now = await wait_role(harness, "prefill-1", Role.DECODE, RESTART_TIMEOUT_S)
                await wait_works_as(client, "prefill-1", Role.DECODE)
                await stream.wait_more(NUM_CLIENTS)
            assert now.num_restarts == was.num_restarts + 1
            assert not set(record_of(now).rank_pids) & set(pids)
            assert not any(is_running(pid) for pid in pids)
            await assert_ledger(client, 3)
            await canary.assert_alive(client, num_expected_restarts=1)


@pytest.mark.soak
async def test_rank_that_freezes_between_two_roles_is_killed_and_its_replica_started_anew(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(
        tiny_llama_folder,
        num_prefill=2,
        registry_lease_s=1.5,
        heartbeat_s=0.2,
        **of_ranks(tiny_llama_folder, 1, 2),
    ) as harness:
        async with harness.connect() as client:
            pids = await _flip_until_between_roles(harness, "prefill-1")
            now = await wait_role(harness, "prefill-1", Role.DECODE, RESTART_TIMEOUT_S)
            assert now.num_restarts == 1
            assert not any(is_running(pid) for pid in pids)
            await client.generate(PLANS[0].request())
            await assert_ledger(client, 3)


@pytest.mark.soak
async def test_streams_go_on_when_a_rank_is_killed_while_its_replica_drains_to_flip(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(
        tiny_llama_folder, num_decode=2, decode_faults=SLOW, **of_ranks(tiny_llama_folder, 2, 1)
    ) as harness:
        async with harness.connect() as client:
            known = Undisturbed(harness)
            await known.learn(client, [FAIRLY_LONG])
            await client.wait_idle()
            stream = Stream(FAIRLY_LONG).start(client)
            name = await client.busy_worker("decode")
            pids = record_of(harness.cluster.member(name)).rank_pids
            harness.cluster.flip(name, Role.PREFILL)
            await _wait_line(harness, f"[{name}] draining")
            os.kill(pids[1], signal.SIGKILL)
            known.check(FAIRLY_LONG, await stream.end())
            now = await wait_role(harness, name, Role.PREFILL, RESTART_TIMEOUT_S)
            assert now.num_restarts == 1
            await assert_ledger(client, 3)


@pytest.mark.soak
async def test_client_that_cancels_while_a_replica_drains_lets_it_flip_at_once(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(
        tiny_llama_folder,
        num_decode=2,
        decode_faults=SLOW,
        drain_timeout_s=60.0,
        **of_ranks(tiny_llama_folder, 1, 2),
    ) as harness:
        async with harness.connect() as client:
            call = client.start(LONG.request())
            await anext(aiter(call))
            name = await client.busy_worker("decode")
            was = harness.cluster.member(name)
            harness.cluster.flip(name, Role.PREFILL)
            await _wait_line(harness, f"[{name}] draining")
            with pytest.raises(ConfigError, match=f"{name} does not serve as a prefill replica"):
                harness.cluster.flip(name, Role.DECODE)
            call.cancel()
            # The stream would have held it for half a minute.
            now = await wait_role(harness, name, Role.PREFILL, timeout_s=10.0)
            assert record_of(now).rank_pids == record_of(was).rank_pids
            await assert_ledger(client, 3)
            assert len((await client.generate(PLANS[0].request())).token_ids) == 24


@pytest.mark.soak
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)], ids=["TP2", "PP2"])
async def test_replicas_that_flip_at_random_for_half_a_minute_lose_and_change_nothing(
    tensor: int,
    stages: int,
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    rng = random.Random(5)
    with running_cluster(
        tiny_llama_folder,
        num_prefill=2,
        num_decode=2,
        **of_ranks(tiny_llama_folder, tensor, stages),
    ) as harness:
        async with harness.connect() as client:
            known = Undisturbed(harness)
            await known.learn(client, PLANS)
            canary = await Canary.hatch(harness, client)
            num_flips, until_s = 0, time.monotonic() + 30.0
            async with RequestStream(client, known, PLANS, NUM_CLIENTS) as stream:
                while time.monotonic() < until_s:
                    one = rng.choice(harness.cluster.members())
                    role = Role.DECODE if one.role is Role.PREFILL else Role.PREFILL
                    # The last of its pool, or one that is on its way.
                    with suppress(ConfigError):
                        harness.cluster.flip(one.worker_id, role)
                        num_flips += 1
                    await asyncio.sleep(rng.random())
                await stream.wait_more(NUM_CLIENTS)
            harness.wait_all_registered()
            assert num_flips >= 5
            await assert_ledger(client, 4)
            await canary.assert_alive(client)


async def _flip_until_between_roles(harness: ClusterHarness, worker_id: str) -> tuple[int, ...]:
    """Flips an idle replica whose rank 1 stands still, so that the others wait for it; its pids."""
    pids = record_of(harness.cluster.member(worker_id)).rank_pids
    os.kill(pids[1], signal.SIGSTOP)
    harness.cluster.flip(worker_id, Role.DECODE)
    await _wait_line(harness, worker_id, "changes its role")
    return pids


async def _wait_line(harness: ClusterHarness, *texts: str) -> None:
    async def was_written() -> bool:
        return any(all(text in line for text in texts) for line in list(harness.lines))

    await wait_until_async(was_written, 15, " ".join(texts))
