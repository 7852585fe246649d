"""What clients meet: bounds, cancels, slow readers, drains, and who serves them."""

import asyncio
import logging
import math
import random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import (
    Cancelled,
    InternalError,
    InvalidField,
    ModelNotFound,
    NoWorker,
    Overloaded,
    TooLong,
)
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.router_harness import PROMPT, eventually, generate, request_for, run_cluster


async def test_text_ids_and_usage_agree(cluster):
    await cluster.add_pair()
    request = request_for(max_tokens=5)
    result = await generate(cluster, request)
    assert result.token_ids == expected_tokens(PROMPT, 5)
    usage = result.completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 5, 16)
    assert result.finish.finish_reason == 2


async def test_a_chat_is_rendered_with_the_models_template(cluster):
    await cluster.add_pair()
    request = request_for(max_tokens=2)
    request.chat.messages.add(role="user", content="hi")
    result = await generate(cluster, request)
    assert result.error is None
    (spec,) = cluster.worker("p0").specs
    assert spec.token_ids[0] == 1
    assert list(spec.token_ids).count(2) == 1


async def test_logprobs_come_for_every_token_the_first_included(cluster):
    await cluster.add_pair()
    result = await generate(cluster, request_for(max_tokens=6, logprobs=0))
    assert [one.token_id for one in result.logprobs] == result.token_ids
    assert [one.logprob for one in result.logprobs] == [-float(i) for i in range(6)]


async def test_D8_a_stop_string_cuts_text_ids_logprobs_and_usage_at_one_place(cluster):
    await cluster.add_pair()
    whole = await generate(cluster, request_for(max_tokens=30, logprobs=0))
    # A stop of two printable characters that are in two different tokens.
    stop = next(
        whole.text[i : i + 2]
        for i in range(4, len(whole.text) - 2)
        if whole.text[i : i + 2].isascii() and whole.text[i : i + 2].isprintable()
    )
    result = await generate(cluster, request_for(max_tokens=30, logprobs=0, stop=[stop]))
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish.stop_string == stop
    assert result.finish.finish_reason == 1
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) < 30
    assert len(result.logprobs) == len(result.token_ids) == result.finish.num_tokens
    assert result.completion.usage.completion_tokens == len(result.token_ids)
    await cluster.quiet()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("request_id", {"request_id": "x" * 129}),
        ("request_id", {"request_id": "a\nb"}),
        ("prompt", {"prompt": None}),
        ("token_ids", {"ids": []}),
        ("token_ids", {"ids": [384]}),
        ("token_ids", {"ids": [2]}),
        ("text", {"text": ""}),
        ("chat.messages", {"messages": []}),
        ("chat.messages[0].role", {"messages": [("robot", "hi")]}),
        ("sampling.temperature", {"temperature": math.nan}),
        ("sampling.top_p", {"top_p": 0.0}),
        ("sampling.n", {"n": 9}),
        ("sampling.max_tokens", {"max_tokens": 0}),
    ],
)
async def test_D1_D4_a_bad_field_is_named_and_the_next_request_is_served(cluster, field, change):
    await cluster.add_pair()
    sampling = {
        name: value
        for name, value in change.items()
        if name not in ("request_id", "prompt", "ids", "text", "messages")
    }
    request = request_for(**sampling)
    if "prompt" in change:
        request.ClearField("prompt")
    if "ids" in change:
        request.token_ids.ids[:] = change["ids"]
    if "text" in change:
        request.text = change["text"]
    if "messages" in change:
        request.chat.SetInParent()
        for role, content in change["messages"]:
            request.chat.messages.add(role=role, content=content)
    if "request_id" in change:
        request.request_id = change["request_id"]
    result = await generate(cluster, request)
    assert isinstance(result.error, InvalidField)
    assert result.error.field == field
    assert (await generate(cluster, request_for(max_tokens=1))).error is None


async def test_D2_the_boundary_is_the_limit_that_model_info_shows(cluster):
    await cluster.add_pair()
    info = await cluster.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    limit = info.max_model_len
    assert limit == 4096
    assert (info.model, info.dtype, info.has_chat_template) == ("tiny", "float32", True)
    fits = await generate(cluster, request_for([7] * (limit - 1), max_tokens=1))
    assert fits.error is None
    for prompt, max_tokens in ((limit, 1), (limit + 1, 1), (10 * limit, 1), (limit - 4, 5)):
        refused = await generate(cluster, request_for([7] * prompt, max_tokens=max_tokens))
        assert isinstance(refused.error, TooLong)


async def test_D2_the_limit_is_that_of_the_worker_that_holds_least(cluster):
    await cluster.add("p0")
    await cluster.add("d0", max_model_len=100)
    await cluster.add("d1")
    await cluster.ready(3)
    info = await cluster.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert info.max_model_len == 100
    assert info.dtype == "float32"
    assert (await generate(cluster, request_for([7] * 99, max_tokens=1))).error is None
    for prompt, max_tokens in ((100, 1), (90, 11)):
        refused = await generate(cluster, request_for([7] * prompt, max_tokens=max_tokens))
        assert isinstance(refused.error, TooLong)
    await cluster.worker("d0").die()
    await cluster.ready(2)
    assert (await generate(cluster, request_for([7] * 100, max_tokens=50))).error is None


async def test_another_models_name_is_not_found(cluster):
    await cluster.add_pair()
    request = request_for()
    request.model = "other"
    assert isinstance((await generate(cluster, request)).error, ModelNotFound)


async def test_an_id_in_flight_is_refused(cluster):
    await cluster.add_pair(token_delay_s=0.02)
    first = asyncio.create_task(generate(cluster, request_for(request_id="one", max_tokens=20)))
    await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
    second = await generate(cluster, request_for(request_id="one"))
    assert isinstance(second.error, InvalidField)
    assert (await first).error is None


async def test_one_more_than_the_queue_holds_is_overloaded(text_folder):
    async with run_cluster(text_folder, max_queued=2, no_worker_wait_s=0.5) as cluster:
        waiting = [asyncio.create_task(generate(cluster)) for _ in range(2)]
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 2)
        refused = await generate(cluster)
        assert isinstance(refused.error, Overloaded)
        assert 0 < refused.error.retry_after_s <= 30
        for result in await asyncio.gather(*waiting):
            assert isinstance(result.error, NoWorker)
        await cluster.quiet()


async def test_abort_ends_a_request_as_cancelled(cluster):
    await cluster.add_pair(token_delay_s=0.02)
    running = asyncio.create_task(generate(cluster, request_for(request_id="r", max_tokens=500)))
    await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
    await cluster.stub.Abort(inference_pb2.AbortRequest(request_id="r"))
    assert isinstance((await running).error, Cancelled)
    await cluster.stub.Abort(inference_pb2.AbortRequest(request_id="r"))
    await cluster.quiet()


async def test_D14_cancels_at_random_points_leave_nothing_behind(cluster, caplog):
    await cluster.add("p0", Script(token_delay_s=0.001))
    await cluster.add("p1", Script(hold_first_token_s=0.005))
    await cluster.add("d0", Script(token_delay_s=0.002, refuse_reservations=10))
    await cluster.add("d1", Script(token_delay_s=0.002))
    await cluster.ready(4)
    random_number = random.Random(1)
    await generate(cluster)
    await cluster.quiet()
    num_tasks = len(asyncio.all_tasks())

    async def cancel_after(num_messages: int) -> None:
        call = cluster.stub.Generate(request_for(max_tokens=200), timeout=20)
        for _ in range(num_messages):
            await call.read()
        call.cancel()

    await asyncio.gather(*(cancel_after(random_number.randrange(0, 12)) for _ in range(100)))
    await cluster.quiet()
    await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (await generate(cluster)).error is None


async def test_D11_a_client_that_does_not_read_is_cut_alone(text_folder):
    long = {"max_tokens": 1500, "logprobs": 20}
    async with run_cluster(text_folder, max_client_buffer_bytes=64 * 1024) as cluster:
        # Slow enough that a client which does read keeps up, however busy the machine is.
        await cluster.add("d0", Script(token_delay_s=0.001))
        await cluster.ready(1)
        # A client whose window does not grow: its transport takes 64 KiB and no more.
        address, options = f"127.0.0.1:{cluster.port}", [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            stuck = stub.Generate(request_for(**long), timeout=60)
            await stuck.read()
            reading = await generate(cluster, request_for(**long), timeout_s=60)
            assert reading.error is None
            assert len(reading.token_ids) == 1500
            await eventually(lambda: cluster.front.dispatcher.num_in_flight == 0)
            assert 0 < await _read_to_the_error(stuck) < 1400
            assert (await stuck.code()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await cluster.quiet()


async def test_D12_a_message_over_the_limit_is_refused_with_both_sizes(text_folder):
    async with run_cluster(text_folder, max_request_bytes=10_000) as cluster:
        request = request_for()
        request.text = "x" * 20_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Generate(request, timeout=5).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "10000" in (caught.value.details() or "")


async def test_a_defect_of_the_router_is_internal_and_shows_nothing(cluster, monkeypatch):
    await cluster.add_pair()

    async def fail(*_: object, **__: object) -> None:
        raise KeyError("inner detail")

    monkeypatch.setattr(cluster.front.intake.maker, "make", fail)
    result = await generate(cluster)
    assert isinstance(result.error, InternalError)
    assert "inner detail" not in str(result.error)


async def _read_to_the_error(call) -> int:
    num_tokens = 0
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            assert message.WhichOneof("event") == "chunk"
            num_tokens += len(message.chunk.token_ids)
    except grpc.aio.AioRpcError:
        return num_tokens
    raise AssertionError("the stream ended well")


async def test_C15_a_draining_front_refuses_new_work_and_finishes_the_old(cluster):
    await cluster.add_pair(token_delay_s=0.01)
    async with open_channel(f"127.0.0.1:{cluster.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest()

        async def status() -> int:
            return (await health.Check(asked)).status

        while await status() != 1:
            pass
        running = asyncio.create_task(generate(cluster, request_for(max_tokens=30)))
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
        draining = asyncio.create_task(cluster.front.drain(10.0))
        await eventually(lambda: cluster.front.intake.is_draining)
        assert isinstance((await generate(cluster)).error, NoWorker)
        assert (await running).token_ids == expected_tokens(PROMPT, 30)
        await draining
        assert await status() == 2


async def test_a_second_turn_goes_to_the_workers_of_the_first(cluster):
    for name in ("p0", "p1", "p2", "d0", "d1", "d2"):
        await cluster.add(name)
    await cluster.ready(6)
    prompt = [11 + number % 300 for number in range(300)]
    first = await generate(cluster, request_for(prompt, max_tokens=100))
    for _ in range(4):
        await generate(cluster, request_for(max_tokens=1))
    follow_up = [*prompt, *first.token_ids, *range(20, 60)]
    second = await generate(cluster, request_for(follow_up, max_tokens=4))
    for side in ("prefill_worker", "decode_worker"):
        assert getattr(second.completion.timeline, side) == getattr(first.completion.timeline, side)


async def test_C11_a_dead_worker_with_the_hottest_prefix_is_avoided_at_once(cluster):
    for name in ("p0", "p1", "d0", "d1"):
        await cluster.add(name)
    await cluster.ready(4)
    prompt = [11 + number % 300 for number in range(300)]
    first = await generate(cluster, request_for(prompt, max_tokens=4))
    timeline = first.completion.timeline
    await cluster.worker(timeline.prefill_worker).die()
    await cluster.worker(timeline.decode_worker).die()
    for _ in range(5):
        again = await generate(cluster, request_for(prompt, max_tokens=4))
        assert again.error is None
        assert again.completion.timeline.decode_worker != timeline.decode_worker


async def test_A17_workers_of_different_geometry_are_never_paired(text_folder, caplog):
    async with run_cluster(text_folder, no_worker_wait_s=0.1) as cluster:
        await cluster.add("p0", digest=b"one")
        await cluster.add("d0", digest=b"two")
        await cluster.ready(2)
        result = await generate(cluster)
        assert isinstance(result.error, NoWorker)
        assert "compatible" in str(result.error)
    warned = [one for one in caplog.records if one.message == "workers cannot be paired"]
    assert len(warned) == 1
    assert warned[0].differing == "layout or wire_version"


async def test_a_burst_is_spread_before_any_worker_reports(cluster):
    for name in ("p0", "p1", "d0", "d1"):
        await cluster.add(name, Script(token_delay_s=0.01))
    await cluster.ready(4)
    results = await asyncio.gather(
        *(generate(cluster, request_for([50 + n] * 40, max_tokens=10)) for n in range(8))
    )
    used = [result.completion.timeline.decode_worker for result in results]
    assert sorted(used) == ["d0"] * 4 + ["d1"] * 4
    await cluster.quiet()
