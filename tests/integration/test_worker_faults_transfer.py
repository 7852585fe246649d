"""Hand-offs that go wrong: spoiled frames, dead or restarted peers, requests cut in the middle."""

import asyncio
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from launcher.client import Generation
from launcher.held_port import HeldPort
from launcher.role_commands import HIDDEN_FIELDS, environment_of, role_command
from pdserve.config.load import to_argv
from pdserve.config.worker import FaultConfig, WorkerConfig
from pdserve.process import ChildProcess, spawn
from pdserve.request import Role
from tests.support.cluster import (
    TEST_ENGINE,
    TEST_HANDOFF,
    ClusterHarness,
    HarnessClient,
    running_cluster,
    wait_until_async,
)
from tests.support.faults import (
    SHORT_HANDOFF,
    SHORT_TIMES,
    SLOW_DECODE,
    SLOW_PREFILL,
    Stream,
    Undisturbed,
    find_victim,
    incarnations,
    random_plan,
    start_all,
    wait_reborn,
)
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger, assert_not_recomputed

_RNG = random.Random(11)
PLAN = random_plan(_RNG, 512, 8, is_greedy=True)
"""Eight frames, spread over eight chunks."""
OTHER = random_plan(_RNG, 500, 8, is_greedy=False)
NUM_FRAMES = 8
KV_BLOCK_BYTES = 8192
"""Of the tiny Llama: 2 x 2 layers x 2 heads x 16 x 4 bytes x 16 slots."""


@contextmanager
def small_cluster(folder: Path, **changes: object) -> Iterator[ClusterHarness]:
    """One worker of each pool (unless told otherwise) and no prefix cache."""
    engine = replace(
        TEST_ENGINE,
        model=str(folder),
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    with running_cluster(folder, **{**SHORT_TIMES, "engine": engine, **changes}) as harness:
        yield harness


async def test_A9_A11_spoiled_frames_are_refused_and_unseen_ones_change_the_tokens(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    # The first request sends frames 1 to 8. What the second sends after its spoiled frame may be
    # some of the rest, and then all eight again: at most 24 frames so far.
    faults = FaultConfig(corrupt_frame=NUM_FRAMES + 3, corrupt_frame_silently=4 * NUM_FRAMES)
    with small_cluster(tiny_llama_folder, prefill_faults=faults) as cluster:
        async with cluster.connect() as client:
            expected = await client.generate(PLAN.request())
            assert_not_recomputed(expected)
            refused = await client.generate(PLAN.request())
            assert refused.token_ids == expected.token_ids
            decode = cluster.scrape_worker("decode-0")
            assert decode["pdserve_frames_rejected_total"] >= 1
            assert decode["pdserve_handoffs_failed_total"] == 1
            assert decode["pdserve_recomputed_prompt_tokens_total"] == 0
            later = [await client.generate(PLAN.request()) for _ in range(4)]
            wrong = [one for one in later if one.token_ids != expected.token_ids]
            assert len(wrong) == 1, "decode does not compute from the KV that was shipped"
            assert wrong[0].token_ids[0] == expected.token_ids[0], "prefill made the first one"
            await assert_ledger(client, 2)


@pytest.fixture(scope="module")
def tight(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    """A decode pool with room for one of the plans at a time."""
    num_blocks = (len(PLAN.prompt_ids) + 3 * 16) // 16
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=num_blocks * KV_BLOCK_BYTES,
    )
    with small_cluster(
        tiny_llama_folder, engine=engine, prefill_faults=SLOW_PREFILL, decode_faults=SLOW_DECODE
    ) as harness:
        yield harness


@pytest.fixture(scope="module")
def undisturbed(tight: ClusterHarness) -> Undisturbed:
    return Undisturbed(tight)


async def learn(undisturbed: Undisturbed, client: HarnessClient) -> None:
    # One after the other: there is room for one.
    await undisturbed.learn(client, [PLAN])
    await undisturbed.learn(client, [OTHER])
    await assert_ledger(client, 2)


async def test_A7_prompt_given_up_in_the_middle_gives_decode_no_token(
    tight: ClusterHarness, undisturbed: Undisturbed
) -> None:
    async with tight.connect() as client:
        await learn(undisturbed, client)
        generated = tight.scrape_worker("decode-0")["vllm:generation_tokens_total"]
        call = client.start(PLAN.request(), timeout_s=0.45)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await assert_ledger(client, 2)
        assert tight.scrape_worker("decode-0")["vllm:generation_tokens_total"] == generated


async def test_A10_blocks_of_a_cut_transfer_are_clean_for_their_next_owner(
    tight: ClusterHarness, undisturbed: Undisturbed
) -> None:
    async with tight.connect() as client:
        await learn(undisturbed, client)
        for _ in range(3):
            (stream,) = start_all(client, [PLAN])
            await find_victim(client, [stream], "mid-transfer", "decode")
            assert stream.task is not None
            stream.task.cancel()
            # At once: it gets the very blocks that were being written.
            undisturbed.check(OTHER, await client.generate(OTHER.request()))
        await assert_ledger(client, 2)


async def test_A4_killed_decode_worker_leaves_nothing_held_on_prefill_past_its_lease(
    tight: ClusterHarness, undisturbed: Undisturbed
) -> None:
    tight.wait_all_registered()
    async with tight.connect() as client:
        await learn(undisturbed, client)
        before = incarnations(tight)
        (stream,) = start_all(client, [PLAN])
        await find_victim(client, [stream], "mid-transfer", "decode")
        tight.cluster.kill("decode-0")
        # There is no other decode worker: the request waits for this one's next life.
        undisturbed.check(PLAN, await stream.end())
        await wait_reborn(tight, "decode-0", before["decode-0"])
        await assert_ledger(client, 2, timeout_s=SHORT_HANDOFF.lease_s)


@contextmanager
def prefill_on_port(cluster: ClusterHarness, port: int) -> Iterator[ChildProcess]:
    """Starts one more prefill worker by hand, and kills it in the end."""
    decode = cluster.cluster.member("decode-0").record
    assert decode is not None
    config = WorkerConfig(
        role=Role.PREFILL,
        worker_id="prefill-by-hand",
        engine=cluster.config.engine,
        port=port,
        redis_url=cluster.cluster.redis_url,
        cluster=cluster.cluster.name,
        heartbeat_s=0.2,
        registry_lease_s=1.5,
        handoff=SHORT_HANDOFF,
        faults=SLOW_PREFILL,
    )
    argv = [*role_command("prefill-worker"), *to_argv(config, without=("role", *HIDDEN_FIELDS))]
    child = spawn(
        argv, env=environment_of(config), stdout=subprocess.DEVNULL, name="prefill-by-hand"
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(5.0)


_DEATHS_PER_REQUEST = 5
"""Fewer than the attempts that a request has."""


async def restart_prefill_on_one_port(folder: Path, num_restarts: int) -> None:
    """Kills the only prefill worker in mid-transfer, again and again; decode must not mind."""
    with (
        closing(HeldPort("127.0.0.1")) as held,
        small_cluster(folder, num_prefill=0, num_decode=1, decode_faults=SLOW_DECODE) as cluster,
    ):
        port = held.number
        async with cluster.connect() as client:
            # Without a prefill pool so far: the decode worker computes all by itself.
            canary = await Canary.hatch(cluster, client)
            undisturbed = Undisturbed(cluster)
            await undisturbed.learn(client, [PLAN])
            stream: Stream | None = None
            for number in range(1, num_restarts + 1):
                with prefill_on_port(cluster, port) as child:
                    await wait_for_prefill(client)
                    if stream is None:
                        (stream,) = start_all(client, [PLAN])
                    await find_victim(client, [stream], "mid-transfer", "decode")
                    child.send_signal(signal.SIGKILL)
                if number % _DEATHS_PER_REQUEST and number < num_restarts:
                    continue
                with prefill_on_port(cluster, port):
                    await wait_for_prefill(client)
                    undisturbed.check(PLAN, await stream.end())
                    await assert_ledger(client, 2)
                    await canary.assert_alive(client, num_expected_restarts=0)
                stream = None


async def wait_for_prefill(client: HarnessClient) -> None:
    async def is_there() -> bool:
        workers = (await client.loads()).values()
        return any(w.role == "prefill" and w.state == "ready" for w in workers)

    await wait_until_async(is_there, 30.0, "the prefill worker is there")


async def test_C2_prefill_restarted_on_one_port_never_harms_decode(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    await restart_prefill_on_one_port(tiny_llama_folder, num_restarts=1)


@pytest.mark.soak
async def test_C2_prefill_restarted_fifty_times_on_one_port_never_harms_decode(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    await restart_prefill_on_one_port(tiny_llama_folder, num_restarts=50)


async def test_C9_requests_that_come_during_a_step_longer_than_a_call_take_one_attempt(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(
        tiny_llama_folder,
        handoff=replace(TEST_HANDOFF, call_timeout_s=0.4),
        prefill_faults=FaultConfig(step_delay_s=1.0),
    ) as cluster:
        async with cluster.connect() as client:

            async def generate_after(delay_s: float) -> Generation:
                await asyncio.sleep(delay_s)
                prompt = tuple(range(10 + int(20 * delay_s), 50))
                return await client.generate(prompt_ids=prompt, max_tokens=2)

            # Some of them begin to wait with most of a step ahead of them.
            found = await asyncio.gather(*(generate_after(0.15 * i) for i in range(10)))
            attempts = [one.timeline.attempts for one in found if one.timeline is not None]
            assert attempts == [1] * 10
            await assert_ledger(client, 2)
