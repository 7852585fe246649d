"""Crowds at a whole cluster in real processes: cancelled, preempted, and handed off all at once."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import grpc
import pytest

from launcher.client import Generation
from pdserve.config.worker import FaultConfig
from tests.support.cluster import (
    TEST_ENGINE,
    HarnessClient,
    make_request,
    running_cluster,
    wait_until,
)
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_ledger, assert_same_tokens

KV_BLOCK_BYTES = 8192
STEP_S = 0.05
NUM_LONG, LONG_TOKENS, CHUNK_TOKENS = 10, 900, 64
SLACK_S = 0.75
"""Of a busy machine; what ten prompts would take is ten times as much."""


def draw_prompt(numbers: random.Random, length: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(3, 380) for _ in range(length))


async def time_first(client: HarnessClient, prompt: Sequence[int]) -> float:
    """Returns the seconds to a request's first message."""
    begun_s, firsts_s = time.monotonic(), list[float]()
    await client.generate(
        prompt_ids=prompt,
        max_tokens=2,
        temperature=0.0,
        on_message=lambda _: firsts_s.append(time.monotonic()),
    )
    return firsts_s[0] - begun_s


@pytest.mark.soak
async def test_A5_a_short_prompt_behind_ten_cancelled_long_ones_is_served_at_once(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    """Each chunk of 64 tokens takes 50 ms: uncancelled, the long ones would take 7 s."""
    numbers = random.Random(1)
    engine = replace(TEST_ENGINE, model=str(tiny_llama_folder), max_num_batched_tokens=CHUNK_TOKENS)
    slow = FaultConfig(step_delay_s=STEP_S)
    with running_cluster(tiny_llama_folder, engine=engine, prefill_faults=slow) as harness:
        async with harness.connect() as client:
            base_s = await time_first(client, draw_prompt(numbers, 20))
            calls = [
                client.start(
                    make_request(prompt_ids=draw_prompt(numbers, LONG_TOKENS), max_tokens=4)
                )
                for _ in range(NUM_LONG)
            ]
            reads = [asyncio.ensure_future(call.read()) for call in calls]
            await asyncio.sleep(4 * STEP_S)
            for call in calls:
                call.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            assert {await call.code() for call in calls} == {grpc.StatusCode.CANCELLED}
            found_s = await time_first(client, draw_prompt(numbers, 20))
            assert found_s <= base_s + STEP_S + SLACK_S
            await assert_ledger(client, num_workers=2)


@pytest.mark.soak
async def test_B6_a_long_preempted_sequence_goes_back_to_the_prefill_pool(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    """400 tokens (of 32k) fill most of a small pool; the others outgrow the rest of it."""
    numbers = random.Random(2)
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        max_model_len=512,
        kv_cache_memory_bytes=40 * KV_BLOCK_BYTES,
    )
    slow = FaultConfig(step_delay_s=0.01)
    short, long = [draw_prompt(numbers, 20) for _ in range(3)], draw_prompt(numbers, 400)

    async def run(client: HarnessClient, prompt: Sequence[int]) -> Generation:
        return await client.generate(
            prompt_ids=prompt, max_tokens=90, temperature=0.0, ignore_eos=True
        )

    with running_cluster(
        tiny_llama_folder, engine=engine, decode_faults=slow, local_prefill_tokens=300
    ) as harness:
        async with harness.connect() as client:
            tasks = [asyncio.ensure_future(run(client, prompt)) for prompt in short]
            await client.busy_worker("decode")
            # The youngest is the one to go.
            found = await run(client, long)
            others = await asyncio.gather(*tasks)
            assert found.timeline is not None
            assert found.timeline.preemptions >= 1
            assert found.timeline.local_prefill_tokens == 0
            for one in (found, *others):
                assert one.timeline is not None
                assert one.timeline.recomputed_tokens == 0
            # Behind it: decode must not have its prefix before.
            assert_same_tokens(found, await run(client, long))
            await assert_ledger(client, num_workers=2)
        figures = harness.scrape_worker("decode-0")
        assert figures["pdserve_recomputed_prompt_tokens_total"] == 0


@pytest.mark.soak
async def test_B8_the_last_of_400_hand_offs_at_once_are_as_quick_as_the_second_hundred(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    """Medians of one run, and a bound that only a cost that grows exceeds: tenfold was reported."""
    numbers = random.Random(3)
    prompts = [draw_prompt(numbers, 40) for _ in range(400)]
    ended: list[Generation] = []

    async def run(client: HarnessClient, prompt: Sequence[int]) -> None:
        ended.append(await client.generate(prompt_ids=prompt, max_tokens=4, ignore_eos=True))

    with running_cluster(tiny_llama_folder) as harness:
        async with harness.connect() as client:
            await asyncio.gather(*(run(client, prompt) for prompt in prompts))
            await assert_ledger(client, num_workers=2)
        timelines = [one.timeline for one in ended if one.timeline is not None]
        assert [one.attempts for one in timelines] == [1] * 400
        assert not any(one.recomputed_tokens for one in timelines)
        # A completion does not wait long for what prefill says of the hand-off.
        second, last = (
            [one.handoff_s for one in timelines[first : first + 100] if one.kv_blocks_shipped]
            for first in (100, 300)
        )
        assert min(len(second), len(last)) >= 50
        assert median(last) <= 3 * median(second) + 0.1
        wait_until(
            lambda: harness.scrape_worker("decode-0")["pdserve_handoffs_completed_total"] == 400, 10
        )
