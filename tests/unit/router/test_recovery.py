"""Whatever dies, the client gets the tokens of an undisturbed run, each once, and one end."""

import asyncio
import random

import pytest

from pdserve.errors import DeadlineExceeded, InternalError, NoWorker, Overloaded, WorkerLost
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.router_harness import (
    PROMPT,
    Cluster,
    eventually,
    generate,
    let_others_run,
    request_for,
    run_cluster,
)

NUM_TOKENS = 17
EXPECTED = expected_tokens(PROMPT, NUM_TOKENS)


async def _start(cluster: Cluster, **scripts: Script) -> None:
    names = ["p0", "p1", "d0", "d1"]
    for name in names:
        await cluster.add(name, scripts.get(name))
    await cluster.ready(4)


async def _check(cluster: Cluster, attempts: int | None = None) -> None:
    result = await generate(cluster, request_for(max_tokens=NUM_TOKENS))
    assert result.error is None, result.error
    assert result.token_ids == EXPECTED
    assert result.finish.num_tokens == NUM_TOKENS
    if attempts is not None:
        assert result.completion.timeline.attempts == attempts
    await cluster.quiet()


async def test_an_undisturbed_request_takes_one_attempt(cluster):
    await _start(cluster)
    await _check(cluster, attempts=1)
    assert len(cluster.network.submits) == 1
    assert cluster.network.cancels == []


@pytest.mark.parametrize("index", range(NUM_TOKENS))
async def test_C14_decode_killed_before_token_k_loses_nothing(cluster, index):
    # Both decode workers would die there, and one more saves the request.
    await cluster.add("p0")
    await cluster.add("d0", Script(die_before=index))
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    if index > 0:
        await eventually(lambda: not cluster.worker("d0").is_alive)
    await cluster.add("d1")
    result = await running
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.attempts == (1 if index == 0 else 2)
    await cluster.quiet()


@pytest.mark.parametrize("index", [1, 2, 9, 15])
async def test_C14_decode_killed_after_token_k_loses_nothing(cluster, index):
    await cluster.add("p0")
    await cluster.add("d0", Script(die_after=index))
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    await eventually(lambda: not cluster.worker("d0").is_alive)
    await cluster.add("d1")
    assert (await running).token_ids == EXPECTED
    await cluster.quiet()


async def test_a_worker_that_dies_right_after_the_last_token_changes_nothing(cluster):
    await cluster.add("p0")
    await cluster.add("d0", Script(die_after=NUM_TOKENS - 1))
    await cluster.ready(2)
    await _check(cluster, attempts=1)


@pytest.mark.parametrize("fault", [{"die_before": 0}, {"die_after": 0}])
async def test_C1_prefill_killed_around_its_token_loses_nothing(cluster, fault):
    await cluster.add("p0", Script(**fault))
    await cluster.add("d0")
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    await eventually(lambda: not cluster.worker("p0").is_alive)
    await cluster.add("p1")
    result = await running
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.attempts == 2
    assert result.completion.timeline.prefill_worker == "p1"
    await cluster.quiet()


async def test_C13_a_worker_that_dies_in_submit_is_fenced_by_a_new_attempt(cluster):
    await cluster.add("p0", Script(die_in_submit=True))
    await cluster.add("d0")
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    await eventually(lambda: len(cluster.network.submits) == 1)
    await cluster.add("p1")
    result = await running
    assert result.token_ids == EXPECTED
    attempts = [attempt for _, _, attempt in cluster.network.submits]
    assert attempts == sorted(set(attempts))
    assert attempts[-1] > 1
    await cluster.quiet()


async def test_C13_a_submit_that_is_never_answered_is_no_second_request(cluster):
    await cluster.add("p0", Script(hang_in_submit=True))
    await cluster.add("d0", Script(token_delay_s=0.01))
    await cluster.ready(2)
    await _check(cluster, attempts=1)


async def test_a_frozen_decode_worker_is_left_after_its_silence(cluster):
    await cluster.add("p0")
    await cluster.add("d0", Script(freeze_before=5))
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    await eventually(lambda: cluster.worker("d0").is_frozen)
    await cluster.add("d1")
    assert (await running).token_ids == EXPECTED


@pytest.mark.parametrize("index", [1, 4, 16])
async def test_a_broken_stream_resumes_without_a_new_attempt(cluster, index):
    await cluster.add("p0")
    await cluster.add("d0", Script(break_stream_before=index, token_delay_s=0.002))
    await cluster.ready(2)
    await _check(cluster, attempts=1)
    assert cluster.worker("d0").num_streams >= 1


async def test_a_stream_that_breaks_again_and_again_is_no_failure(cluster):
    await cluster.add("p0")
    decode = await cluster.add("d0", Script(token_delay_s=0.02))
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    for count in range(2, 5):
        decode.break_streams()
        await eventually(lambda count=count: decode.num_streams >= count)
    result = await running
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.attempts == 1


async def test_repeated_and_reordered_updates_come_out_once_and_in_order(cluster):
    await cluster.add("p0", Script(repeat_updates=True, hold_first_token_s=0.05))
    await cluster.add("d0", Script(repeat_updates=True))
    await cluster.ready(2)
    await _check(cluster, attempts=1)


async def test_token_one_may_come_after_the_rest(cluster):
    await cluster.add("p0", Script(hold_first_token_s=0.1))
    await cluster.add("d0")
    await cluster.ready(2)
    result = await generate(cluster, request_for(max_tokens=2))
    assert result.token_ids == EXPECTED[:2]
    timeline = result.completion.timeline
    assert (timeline.prefill_s, timeline.handoff_s) == (0.01, 0.002)


async def test_the_completion_waits_for_the_prefill_workers_times(cluster):
    await cluster.add("p0", Script(hold_first_token_s=0.0))
    await cluster.add("d0")
    await cluster.ready(2)
    timeline = (await generate(cluster, request_for(max_tokens=2))).completion.timeline
    assert timeline.kv_blocks_shipped == 4
    assert timeline.kv_bytes_shipped == 4096
    assert timeline.prefill_worker == "p0"
    assert timeline.decode_worker == "d0"


@pytest.mark.parametrize("index", [1, 8, 16])
async def test_B5_a_preempted_request_goes_on_where_it_was(cluster, index):
    await cluster.add("p0")
    await cluster.add("d0", Script(return_before=index))
    await cluster.ready(2)
    result = await generate(cluster, request_for(max_tokens=NUM_TOKENS))
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.attempts == 2
    assert result.completion.timeline.preemptions == 1
    await cluster.quiet()


async def test_a_returned_request_is_submitted_with_priority_and_its_tokens(cluster):
    prefill = await cluster.add("p0")
    await cluster.add("d0", Script(return_before=6))
    await cluster.ready(2)
    await _check(cluster, attempts=2)
    first, second = prefill.specs
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.handoff_id == second.handoff_id
    assert (first.is_priority, second.is_priority) == (False, True)
    assert list(second.token_ids) == [*PROMPT, *EXPECTED[:6]]
    assert second.num_prompt_tokens == len(PROMPT)


async def test_a_refused_reservation_is_placed_on_another_decode_worker(cluster):
    await cluster.add("p0")
    await cluster.add("d0", Script(refuse_reservations=1))
    await cluster.add("d1", Script(refuse_reservations=1))
    await cluster.ready(3)
    result = await generate(cluster, request_for(max_tokens=NUM_TOKENS))
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.attempts == 1
    assert len(cluster.network.submits) == 1
    await cluster.quiet()


async def test_a_refusal_by_the_only_decode_worker_is_asked_again(cluster):
    await cluster.add("p0")
    await cluster.add("d0", Script(refuse_reservations=3))
    await cluster.ready(2)
    await _check(cluster, attempts=1)


async def test_refused_submits_go_to_another_worker(cluster):
    await cluster.add("p0", Script(refuse_submits=2))
    await cluster.add("p1", Script(refuse_submits=1))
    await cluster.add("d0")
    await cluster.ready(3)
    await _check(cluster)


async def test_a_pool_that_stays_full_ends_with_its_own_refusal(text_folder):
    async with run_cluster(text_folder, no_worker_wait_s=0.2) as cluster:
        await cluster.add("p0", Script(refuse_submits=10_000))
        await cluster.add("d0")
        await cluster.ready(2)
        result = await generate(cluster)
        assert isinstance(result.error, Overloaded)
        await cluster.quiet()


async def test_a_workers_own_failure_ends_the_request_with_its_status(cluster):
    await cluster.add("p0")
    await cluster.add("d0", Script(fail_before=3))
    await cluster.ready(2)
    result = await generate(cluster)
    assert isinstance(result.error, InternalError)
    assert result.token_ids == expected_tokens(PROMPT, 3)
    await cluster.quiet()


async def test_no_worker_within_the_wait_is_unavailable(text_folder):
    async with run_cluster(text_folder, no_worker_wait_s=0.1) as cluster:
        result = await generate(cluster)
        assert isinstance(result.error, NoWorker)
        await cluster.quiet()


async def test_a_request_waits_for_a_worker_that_comes_late(cluster):
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
    await cluster.add("p0")
    await cluster.add("d0")
    assert (await running).token_ids == EXPECTED


async def test_a_request_that_kills_every_worker_ends_after_max_attempts(text_folder):
    async with run_cluster(text_folder, max_attempts=2) as cluster:
        for name in ("d0", "d1", "d2", "d3"):
            await cluster.add(name, Script(die_before=3))
        await cluster.ready(4)
        result = await generate(cluster)
        assert isinstance(result.error, WorkerLost)
        assert result.token_ids == expected_tokens(PROMPT, 3)
        assert sum(worker.is_alive for worker in cluster.network.workers.values()) == 2
        await cluster.quiet()


async def test_without_a_prefill_pool_decode_does_all(cluster):
    await cluster.add("d0", Script(die_before=5))
    await cluster.add("d1", Script(die_before=9))
    await cluster.add("d2")
    await cluster.ready(3)
    result = await generate(cluster, request_for(max_tokens=NUM_TOKENS))
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.prefill_worker == ""
    await cluster.quiet()


async def test_the_deadline_ends_a_request_and_frees_the_workers(cluster):
    await cluster.add("p0")
    await cluster.add("d0", Script(token_delay_s=0.05))
    await cluster.ready(2)
    result = await generate(cluster, request_for(max_tokens=1000), timeout_s=0.3)
    assert isinstance(result.error, DeadlineExceeded)
    await cluster.quiet()


async def test_C2_a_restart_on_the_same_port_is_another_worker(cluster):
    await cluster.add("p0")
    first = await cluster.add("d0", Script(token_delay_s=0.02))
    await cluster.ready(2)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=NUM_TOKENS)))
    await eventually(lambda: bool(first.held))
    await first.die()
    await cluster.add("d0", incarnation=77, port=first.port)
    result = await running
    assert result.token_ids == EXPECTED
    assert result.completion.timeline.attempts == 2
    await cluster.quiet()


async def test_C18_an_unavailable_registry_changes_nothing(cluster):
    await _start(cluster)
    cluster.registry.is_available = False
    await _check(cluster, attempts=1)
    cluster.registry.is_available = True
    cluster.registry.clear()
    await _check(cluster, attempts=1)


async def test_G1_deaths_and_restarts_under_load_lose_no_token(cluster):
    rng = random.Random(3)
    for name in ("p0", "p1", "d0", "d1", "d2"):
        await cluster.add(name, Script(token_delay_s=0.004))
    await cluster.ready(5)
    prompts = [[20 + number, *PROMPT] for number in range(40)]

    async def one(number: int) -> None:
        request = request_for(prompts[number], max_tokens=20 + number)
        result = await generate(cluster, request)
        assert result.error is None
        assert result.token_ids == expected_tokens(prompts[number], 20 + number)

    running = [asyncio.create_task(one(number)) for number in range(40)]
    for incarnation in range(1000, 1006):
        alive = [worker for worker in cluster.network.workers.values() if worker.is_alive]
        victim = rng.choice(alive)
        num_before = len(cluster.network.cancels) + len(cluster.network.submits)
        await victim.die()
        script = Script(token_delay_s=0.004)
        await cluster.add(victim.worker_id, script, incarnation=incarnation, port=victim.port)
        await eventually(
            lambda num=num_before: (
                len(cluster.network.cancels) + len(cluster.network.submits) > num
                or all(task.done() for task in running)
            )
        )
        await cluster.ready(5)
    await asyncio.gather(*running)
    await cluster.quiet()


@pytest.mark.parametrize("seed", range(4))
async def test_A6_a_cancel_at_any_stage_frees_every_worker(cluster, seed):
    rng = random.Random(seed)
    await cluster.add("p0", Script(refuse_reservations=0, hold_first_token_s=0.002))
    await cluster.add("d0", Script(refuse_reservations=5, token_delay_s=0.001))
    await cluster.ready(2)

    async def one() -> None:
        call = cluster.stub.Generate(request_for(max_tokens=100), timeout=20)
        if rng.random() < 0.5:
            await call.read()
        await let_others_run(rng.randrange(0, 40))
        call.cancel()

    await asyncio.gather(*(one() for _ in range(20)))
    await cluster.quiet()
