"""Workers killed, frozen or stopped at every stage: same tokens, one end, nothing left behind."""

import asyncio
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pdserve.process import is_running
from pdserve.rpc.server import open_channel
from tests.support.cluster import (
    TEST_ENGINE,
    ClusterHarness,
    HarnessClient,
    running_cluster,
    wait_until,
)
from tests.support.faults import (
    SHORT_TIMES,
    SLOW_DECODE,
    SLOW_PREFILL,
    Plan,
    Side,
    Stage,
    Undisturbed,
    Which,
    find_victim,
    incarnations,
    random_plan,
    start_all,
    wait_for,
    wait_reborn,
)
from tests.support.health import HealthWatch, watch_health
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger, assert_not_recomputed

NUM_WORKERS = 4
NOT_SERVING_S = 5.0
"""Case C9: so long may a frozen engine look healthy."""
_RNG = random.Random(7)
LONG = [
    random_plan(_RNG, 400, 40, is_greedy=True),
    random_plan(_RNG, 390, 40, is_greedy=False),
    random_plan(_RNG, 380, 24, is_greedy=True),
    random_plan(_RNG, 60, 30, is_greedy=False),
]
"""Two for each prefill worker, so that one waits in its queue."""


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    # No prefix cache: a prompt that was seen before would have nothing left to transfer.
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    with running_cluster(
        tiny_llama_folder,
        engine=engine,
        num_prefill=2,
        num_decode=2,
        prefill_faults=SLOW_PREFILL,
        decode_faults=SLOW_DECODE,
        **SHORT_TIMES,
    ) as harness:
        yield harness


@pytest.fixture(scope="module")
def undisturbed(cluster: ClusterHarness) -> Undisturbed:
    return Undisturbed(cluster)


def count_moves(cluster: ClusterHarness) -> float:
    """Returns how many attempts and placements came after a first one."""
    values = cluster.scrape()
    retries = values.get("pdserve_router_retries_total", 0.0)
    return retries + values["pdserve_router_decode_replacements_total"]


async def break_at(
    cluster: ClusterHarness,
    undisturbed: Undisturbed,
    victim: tuple[Side, Which],
    signal_number: signal.Signals,
    stage: Stage,
    plans: list[Plan] = LONG,
) -> None:
    """Breaks the worker that has work at a stage, and checks all that must hold."""
    side, which = victim
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        await undisturbed.learn(client, plans)
        await assert_ledger(client, NUM_WORKERS)
        canary = await Canary.hatch(cluster, client)
        before, num_moves = incarnations(cluster), count_moves(cluster)
        streams = start_all(client, plans)
        worker_id = await find_victim(client, streams, stage, side)
        cluster.cluster.kill(worker_id, which, signal_number)
        found = await asyncio.gather(*(stream.end() for stream in streams))
        for plan, generation in zip(plans, found, strict=True):
            undisturbed.check(plan, generation)
        # Prefill may be through with a commit before the signal comes, and has no part in decoding.
        if side == "decode" or stage not in ("committed", "decoding"):
            assert count_moves(cluster) > num_moves, "nobody noticed"
        await wait_reborn(cluster, worker_id, before[worker_id])
        await assert_ledger(client, NUM_WORKERS)
        await canary.assert_alive(client, num_expected_restarts=1)


CHOSEN: list[tuple[Side, Which, signal.Signals, Stage]] = [
    ("prefill", "face", signal.SIGKILL, "queued"),
    ("prefill", "rank", signal.SIGSTOP, "mid-transfer"),
    ("decode", "face", signal.SIGKILL, "mid-transfer"),
    ("decode", "rank", signal.SIGKILL, "committed"),
]
ALL: list[tuple[Side, Which, signal.Signals, Stage]] = list(
    product(
        ("prefill", "decode"),
        ("face", "rank"),
        (signal.SIGKILL, signal.SIGSTOP),
        ("queued", "mid-prefill", "mid-transfer", "committed", "decoding"),
    )
)


@pytest.mark.parametrize(("side", "which", "signal_number", "stage"), CHOSEN)
async def test_G1_broken_worker_changes_no_token(
    cluster: ClusterHarness,
    undisturbed: Undisturbed,
    side: Side,
    which: Which,
    signal_number: signal.Signals,
    stage: Stage,
) -> None:
    await break_at(cluster, undisturbed, (side, which), signal_number, stage)


@pytest.mark.soak
@pytest.mark.parametrize(("side", "which", "signal_number", "stage"), ALL)
async def test_G1_broken_worker_changes_no_token_at_any_stage(
    cluster: ClusterHarness,
    undisturbed: Undisturbed,
    side: Side,
    which: Which,
    signal_number: signal.Signals,
    stage: Stage,
) -> None:
    await break_at(cluster, undisturbed, (side, which), signal_number, stage)


async def kill_decode_at(
    cluster: ClusterHarness, undisturbed: Undisturbed, num_tokens: int, plan: Plan
) -> None:
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        await undisturbed.learn(client, [plan])
        await client.wait_idle()
        before = incarnations(cluster)
        (stream,) = start_all(client, [plan])
        await wait_for(lambda: stream.num_tokens >= num_tokens, 30.0, "enough tokens")
        worker_id = await client.busy_worker("decode")
        cluster.cluster.kill(worker_id)
        found = await stream.end()
        undisturbed.check(plan, found)
        assert found.timeline is not None
        assert found.timeline.attempts == 2
        await wait_reborn(cluster, worker_id, before[worker_id])
        await assert_ledger(client, NUM_WORKERS)


SHORT_GREEDY = random_plan(_RNG, 90, 68, is_greedy=True)
SHORT_SEEDED = random_plan(_RNG, 90, 68, is_greedy=False)


@pytest.mark.parametrize(("num_tokens", "plan"), [(9, SHORT_SEEDED)])
async def test_C14_decode_killed_at_token_k_changes_no_token(
    cluster: ClusterHarness, undisturbed: Undisturbed, num_tokens: int, plan: Plan
) -> None:
    await kill_decode_at(cluster, undisturbed, num_tokens, plan)


@pytest.mark.soak
@pytest.mark.parametrize("num_tokens", range(65))
async def test_C14_decode_killed_at_every_token_changes_no_token(
    cluster: ClusterHarness, undisturbed: Undisturbed, num_tokens: int
) -> None:
    plan = SHORT_GREEDY if num_tokens % 2 else SHORT_SEEDED
    await kill_decode_at(cluster, undisturbed, num_tokens, plan)


async def test_C1_prefill_killed_in_mid_transfer_leaves_decode_ready_and_the_log_short(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        plan = LONG[0]
        await undisturbed.learn(client, [plan])
        await client.wait_idle()
        before = incarnations(cluster)
        healths = await asyncio.gather(
            *(watch_worker(cluster, f"decode-{number}") for number in range(2))
        )
        num_lines = len(cluster.lines)
        (stream,) = start_all(client, [plan])
        await find_victim(client, [stream], "mid-transfer", "decode")
        worker_id = await find_victim(client, [stream], "mid-transfer", "prefill")
        cluster.cluster.kill(worker_id, "rank")
        found = await stream.end()
        undisturbed.check(plan, found)
        assert found.timeline is not None
        assert found.timeline.attempts == 2
        assert found.timeline.prefill_worker != worker_id
        assert_not_recomputed(found)
        assert len(cluster.lines) - num_lines <= 100
        for health in healths:
            assert await health.stop() == ["SERVING"]
        await wait_reborn(cluster, worker_id, before[worker_id])
        await assert_ledger(client, NUM_WORKERS)
        after = incarnations(cluster)
        assert all(after[name] == before[name] for name in ("decode-0", "decode-1"))


async def watch_worker(cluster: ClusterHarness, worker_id: str) -> HealthWatch:
    record = cluster.cluster.member(worker_id).record
    assert record is not None
    return await watch_health(open_channel(record.address))


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.soak), "decode"])
async def test_C9_frozen_rank_is_not_serving_within_the_limit(
    cluster: ClusterHarness, role: str
) -> None:
    cluster.wait_all_registered()
    worker_id = f"{role}-1"
    before = incarnations(cluster)
    health = await watch_worker(cluster, worker_id)
    cluster.cluster.kill(worker_id, "rank", signal.SIGSTOP)
    assert await health.wait_for("NOT_SERVING", NOT_SERVING_S) <= NOT_SERVING_S
    await health.stop()
    await wait_reborn(cluster, worker_id, before[worker_id])


async def test_C9_busy_worker_is_not_frozen_and_A11_nothing_is_recomputed(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        await undisturbed.learn(client, LONG)
        canary = await Canary.hatch(cluster, client)
        # Long prefills, for well over `frozen_after_s`, with the queues never empty.
        plans = LONG * 4
        found = await asyncio.gather(*(client.generate(plan.request()) for plan in plans))
        for plan, generation in zip(plans, found, strict=True):
            undisturbed.check(plan, generation)
            assert_not_recomputed(generation)
        await canary.assert_alive(client, num_expected_restarts=0)
        await assert_ledger(client, NUM_WORKERS)
    for worker_id in ("decode-0", "decode-1"):
        values = cluster.scrape_worker(worker_id)
        assert values["pdserve_recomputed_prompt_tokens_total"] == 0


async def stop_worker(cluster: ClusterHarness, client: HarnessClient, *, twice: bool) -> None:
    """Ends the decode worker that runs something; it must end as asked."""
    worker_id = await client.busy_worker("decode")
    before = incarnations(cluster)
    num_lines = len(cluster.lines)
    pid = cluster.cluster.member(worker_id).face_pid
    cluster.cluster.kill(worker_id, "face", signal.SIGTERM)
    if twice:
        draining = f"[{worker_id}] draining"
        await wait_for(lambda: draining in cluster.lines[num_lines:], 30.0, "it drains")
        cluster.cluster.kill(worker_id, "face", signal.SIGTERM)
    await wait_for(lambda: cluster.cluster.member(worker_id).face_pid != pid, 40.0, "it ended")
    ended = [line for line in cluster.lines[num_lines:] if line.startswith(f"{worker_id} ended")]
    assert len(ended) == 1
    assert "(status 0)" in ended[0]
    await wait_reborn(cluster, worker_id, before[worker_id])


@pytest.mark.parametrize("twice", [False, True])
async def test_C15_stopped_worker_drains_and_at_the_second_signal_ends_now(
    cluster: ClusterHarness, undisturbed: Undisturbed, twice: bool
) -> None:
    cluster.wait_all_registered()
    plans = [replace(SHORT_GREEDY, max_tokens=100), replace(SHORT_SEEDED, max_tokens=100), *LONG]
    async with cluster.connect() as client:
        await undisturbed.learn(client, plans)
        await client.wait_idle()
        streams = start_all(client, plans)
        await find_victim(client, streams, "decoding", "decode")
        await stop_worker(cluster, client, twice=twice)
        found = await asyncio.gather(*(stream.end() for stream in streams))
        for plan, generation in zip(plans, found, strict=True):
            undisturbed.check(plan, generation)
        attempts = [one.timeline.attempts for one in found if one.timeline is not None]
        assert (max(attempts) > 1) is twice
        await assert_ledger(client, NUM_WORKERS)


async def test_C15_stopped_cluster_lets_every_stream_finish(
    cluster: ClusterHarness, undisturbed: Undisturbed
) -> None:
    """The last of this module: it ends the cluster."""
    cluster.wait_all_registered()
    pids = cluster.cluster.pids()
    async with cluster.connect() as client:
        await undisturbed.learn(client, LONG)
        streams = start_all(client, LONG)
        await find_victim(client, streams, "decoding", "decode")
        num_lines = len(cluster.lines)
        cluster.cluster.request_stop()
        found = await asyncio.gather(*(stream.end() for stream in streams))
        for plan, generation in zip(LONG, found, strict=True):
            undisturbed.check(plan, generation)
    await asyncio.to_thread(cluster.cluster.wait)
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10.0)
    assert not [line for line in cluster.lines[num_lines:] if "starts again" in line]
