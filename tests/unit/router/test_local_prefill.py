"""A follow-up is sent to the decode worker that holds its prefix; and what a refusal leads to."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.errors import LocalPrefillRefused
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.router_harness import (
    Cluster,
    Result,
    eventually,
    generate,
    request_for,
    run_cluster,
)

FIRST = tuple(range(3, 323))
NUM_TOKENS = 8


@pytest.fixture
async def cluster(text_folder: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(text_folder, local_prefill_tokens=128) as running:
        yield running


async def hold_first_turn(cluster: Cluster, script: Script) -> tuple[int, ...]:
    """Serves a first turn, so that d0 holds its blocks; returns the prompt of the second."""
    await cluster.add("p0")
    await cluster.add("d0", script)
    await cluster.ready(2)
    found = await generate(cluster, request_for(FIRST, max_tokens=NUM_TOKENS))
    assert found.error is None, found.error
    cluster.network.submits.clear()
    return (*FIRST, *found.token_ids, 5, 6, 7)


def workers_asked(cluster: Cluster) -> list[tuple[str, int]]:
    return [(worker, attempt) for worker, _, attempt in cluster.network.submits]


def assert_complete(found: Result, prompt: tuple[int, ...], n: int = 1) -> None:
    assert found.error is None, found.error
    for index in range(n):
        assert found.samples[index] == expected_tokens(prompt, NUM_TOKENS, index)


async def test_a_follow_up_is_prefilled_on_the_decode_worker_that_holds_its_prefix(
    cluster: Cluster,
) -> None:
    follow_up = await hold_first_turn(cluster, Script())
    assert_complete(await generate(cluster, request_for(follow_up)), follow_up)
    assert workers_asked(cluster) == [("d0", 1)]
    await cluster.quiet()


@pytest.mark.parametrize("index", [1, 5])
async def test_B6_a_preempted_sequence_is_computed_again_by_the_prefill_pool(
    cluster: Cluster, index: int
) -> None:
    """Although all of it but its last block is cached where it was preempted."""
    script = Script()
    follow_up = await hold_first_turn(cluster, script)
    script.return_before = index
    found = await generate(cluster, request_for(follow_up))
    assert_complete(found, follow_up)
    assert workers_asked(cluster) == [("d0", 1), ("p0", 2)]
    assert found.completion.timeline.preemptions == 1
    await cluster.quiet()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_refused_local_prefill_goes_to_a_hand_off_and_nothing_is_lost(
    cluster: Cluster, n: int
) -> None:
    refusal = LocalPrefillRefused("300 prompt tokens to compute, over the bound of 128")
    script = Script(refusal=refusal)
    follow_up = await hold_first_turn(cluster, script)
    script.refuse_submits = 1
    found = await generate(cluster, request_for(follow_up, n=n))
    assert_complete(found, follow_up, n)
    assert workers_asked(cluster) == [("d0", 1), ("p0", 2)]
    timeline = found.completion.timeline
    assert (timeline.prefill_worker, timeline.decode_worker) == ("p0", "d0")
    assert timeline.kv_blocks_shipped > 0
    await cluster.quiet()


async def test_the_worker_that_refused_is_asked_again_by_the_next_follow_up(
    cluster: Cluster,
) -> None:
    script = Script(refusal=LocalPrefillRefused("over its bound"))
    follow_up = await hold_first_turn(cluster, script)
    script.refuse_submits = 1
    assert_complete(await generate(cluster, request_for(follow_up)), follow_up)
    cluster.network.submits.clear()
    assert_complete(await generate(cluster, request_for(follow_up)), follow_up)
    assert workers_asked(cluster) == [("d0", 1)]
    await cluster.quiet()


async def test_a_hand_off_after_a_refusal_survives_the_death_of_the_prefill_worker(
    cluster: Cluster,
) -> None:
    script = Script(refusal=LocalPrefillRefused("over its bound"))
    follow_up = await hold_first_turn(cluster, script)
    (prefill,) = (one for one in cluster.network.workers.values() if one.worker_id == "p0")
    prefill.script.die_before = 0
    script.refuse_submits = 1
    running = asyncio.create_task(generate(cluster, request_for(follow_up)))
    await eventually(lambda: not prefill.is_alive)
    await cluster.add("p1")
    assert_complete(await running, follow_up)
    assert workers_asked(cluster) == [("d0", 1), ("p0", 2), ("p1", 3)]
    await cluster.quiet()


async def test_without_a_prefill_pool_the_refusal_is_the_clients_answer(cluster: Cluster) -> None:
    refusal = LocalPrefillRefused("over its bound")
    await cluster.add("d0", Script(refuse_submits=1, refusal=refusal))
    await cluster.ready(1)
    found = await generate(cluster, request_for(FIRST))
    assert isinstance(found.error, LocalPrefillRefused)
    await cluster.quiet()
