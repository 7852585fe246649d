"""Several samples of one prompt: together on the way out, each by itself once it must be."""

import asyncio

import pytest

from pdserve.errors import Cancelled
from pdserve.rpc.v1 import worker_pb2
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.router_harness import PROMPT, Cluster, eventually, generate, request_for


async def start(cluster: Cluster, **scripts: Script) -> None:
    for name in ("p0", "p1", "d0", "d1"):
        await cluster.add(name, scripts.get(name))
    await cluster.ready(4)


def assert_complete(result, n: int, max_tokens: int) -> None:
    assert result.error is None
    assert result.samples == {
        index: expected_tokens(PROMPT, max_tokens, index) for index in range(n)
    }
    finishes = result.completion.samples
    assert [one.index for one in finishes] == list(range(n))
    assert all(one.num_tokens == max_tokens for one in finishes)
    assert result.completion.usage.prompt_tokens == len(PROMPT)
    assert result.completion.usage.completion_tokens == n * max_tokens


@pytest.mark.parametrize("n", [2, 4, 8])
async def test_A13_samples_are_submitted_once_and_end_together(cluster, n):
    await start(cluster)
    result = await generate(cluster, request_for(n=n, max_tokens=6))
    assert_complete(result, n, 6)
    assert len(cluster.network.submits) == 1
    assert result.completion.timeline.kv_blocks_shipped == 4
    assert result.completion.timeline.attempts == 1
    await cluster.quiet()


async def test_samples_that_end_on_prefill_need_no_decode_worker(cluster):
    await start(cluster)
    assert_complete(await generate(cluster, request_for(n=3, max_tokens=1)), 3, 1)
    await cluster.quiet()


@pytest.mark.parametrize("index", [0, 1, 3, 5])
async def test_C14_a_decode_worker_that_dies_costs_no_token_of_any_sample(cluster, index):
    scripts = {name: Script(die_before=index, token_delay_s=0.005) for name in ("d0",)}
    await start(cluster, **scripts)
    for number in range(4):
        result = await generate(cluster, request_for(n=4, request_id=f"r{number}"))
        assert_complete(result, 4, 8)
    await cluster.quiet()


async def test_a_prefill_worker_that_dies_before_any_token_is_followed_by_one_submit(cluster):
    await start(cluster, p0=Script(die_before=0), p1=Script(token_delay_s=0.001))
    for number in range(3):
        result = await generate(cluster, request_for(n=4, request_id=f"r{number}"))
        assert_complete(result, 4, 8)
    assert {request for _, request, _ in cluster.network.submits} == {"r0", "r1", "r2"}
    await cluster.quiet()


async def test_refused_samples_are_placed_again_together(cluster):
    await start(cluster, d0=Script(refuse_reservations=1), d1=Script(refuse_reservations=1))
    assert_complete(await generate(cluster, request_for(n=4, request_id="r")), 4, 8)
    placements = [one for worker in cluster.network.workers.values() for one in worker.placements]
    assert placements[0] == ("r", 2)
    assert len(placements) == len(set(placements)) <= 2
    assert len(cluster.network.submits) == 1
    await cluster.quiet()


async def test_refused_submits_keep_the_samples_together(cluster):
    await start(cluster, p0=Script(refuse_submits=2), p1=Script(refuse_submits=2))
    assert_complete(await generate(cluster, request_for(n=3, request_id="r")), 3, 8)
    assert {request for _, request, _ in cluster.network.submits} == {"r"}
    await cluster.quiet()


async def test_without_a_prefill_pool_a_refused_group_stays_together(cluster):
    await cluster.add("d0", Script(refuse_submits=2))
    await cluster.ready(1)
    assert_complete(await generate(cluster, request_for(n=3, request_id="r")), 3, 8)
    assert {request for _, request, _ in cluster.network.submits} == {"r"}
    await cluster.quiet()


async def test_B5_a_returned_sample_goes_on_alone_and_the_others_stay(cluster):
    script = Script(return_before=4, token_delay_s=0.002)
    await start(cluster, d0=script, d1=Script(return_before=4, token_delay_s=0.002))
    result = await generate(cluster, request_for(n=3, request_id="r"))
    assert_complete(result, 3, 8)
    alone = [request for _, request, _ in cluster.network.submits if request != "r"]
    assert 1 <= len(alone) <= 2
    assert all(request.startswith("r#") for request in alone)
    assert result.completion.timeline.preemptions == len(alone)
    await cluster.quiet()


async def test_a_broken_stream_resumes_every_sample(cluster):
    await start(
        cluster,
        d0=Script(break_stream_before=3, token_delay_s=0.002),
        d1=Script(break_stream_before=3, token_delay_s=0.002),
    )
    assert_complete(await generate(cluster, request_for(n=4)), 4, 8)
    await cluster.quiet()


async def test_a_cancel_reaches_all_samples(cluster):
    slow = Script(token_delay_s=0.05)
    await start(cluster, d0=slow, d1=slow)
    call = cluster.stub.Generate(request_for(n=4, max_tokens=500, request_id="r"), timeout=20)
    assert await call.read()
    assert cluster.front.dispatcher.num_in_flight == 1
    call.cancel()
    await eventually(lambda: cluster.front.dispatcher.num_in_flight == 0)
    await cluster.quiet()


async def test_an_abort_by_the_client_s_id_ends_all_samples(cluster):
    slow = Script(token_delay_s=0.05)
    await start(cluster, d0=slow, d1=slow)

    async def abort_later():
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
        assert cluster.front.dispatcher.abort("r")

    task = asyncio.create_task(abort_later())
    result = await generate(cluster, request_for(n=4, max_tokens=500, request_id="r"))
    await task
    assert isinstance(result.error, Cancelled)
    await cluster.quiet()


async def test_one_failed_sample_fails_the_request(cluster):
    await start(cluster, d0=Script(fail_before=3), d1=Script(fail_before=3))
    result = await generate(cluster, request_for(n=4))
    assert result.error is not None
    assert "scripted" in str(result.error)
    await cluster.quiet()


async def test_everything_draining_returns_all_samples_and_they_go_on(cluster):
    draining = worker_pb2.Returned.REASON_DRAINING
    await start(cluster, d0=Script(return_before=2, return_reason=draining))
    for number in range(3):
        assert_complete(await generate(cluster, request_for(n=2, request_id=f"r{number}")), 2, 8)
    await cluster.quiet()
