"""What a stream does when things go wrong or slowly."""

import asyncio
import json
import socket

import pytest

from pdserve.errors import NoWorker
from router.openai.app import HttpFront, HttpParts
from router.openai.http_server import HttpServer
from router.tenants import Keyring
from tests.support.fake_tokens import expected_tokens
from tests.support.http_client import CHAT, add_pair, check_stream, http_client, read_events
from tests.support.router_harness import Cluster, eventually, run_cluster

PROMPT = list(range(10, 50))
STREAM = {"prompt": PROMPT, "stream": True, "return_token_ids": True}


async def test_D10_stream_carries_the_tokens_of_grpc(client, pair):
    answer = await client.post("/v1/completions", json={**STREAM, "max_tokens": 50})
    chunks = check_stream(answer.text)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
    assert ids == expected_tokens(PROMPT, 50)
    await pair.quiet()


async def test_D10_several_prompts_share_one_stream(client, pair):
    prompts = [[n] * 20 for n in (11, 12, 13)]
    body = {**STREAM, "prompt": prompts, "max_tokens": 9, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/completions", json=body)
    chunks = check_stream(answer.text)
    for index, prompt in enumerate(prompts):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        ids = [i for choice in choices for i in choice.get("token_ids", ())]
        assert ids == expected_tokens(prompt, 9)
    assert chunks[-1]["usage"]["completion_tokens"] == 27
    assert chunks[-1]["usage"]["prompt_tokens"] == 60
    await pair.quiet()


async def test_a_stop_string_is_cut_and_named(client):
    whole = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 40})).json()
    text = whole["choices"][0]["text"]
    stop = next(
        text[i : i + 2]
        for i in range(4, len(text) - 2)
        if text[i : i + 2].isascii() and text[i : i + 2].isprintable()
    )
    body = {"prompt": "a", "max_tokens": 40, "stop": stop}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_an_error_before_the_first_byte_is_a_status(text_folder):
    async with run_cluster(text_folder, no_worker_wait_s=0.05) as cluster:
        async with http_client(cluster) as client:
            answer = await client.post("/v1/completions", json=STREAM)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == "no_worker"
        await cluster.quiet()


async def test_D10_an_error_after_the_first_byte_is_one_event_without_done(cluster):
    await add_pair(cluster, fail_before=5)
    async with http_client(cluster) as client:
        answer = await client.post("/v1/completions", json={**STREAM, "max_tokens": 9})
    events = read_events(answer.text)
    assert answer.status_code == 200
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["code"] == "internal_error"
    assert "scripted" not in answer.text
    ids = [i for event in events[:-1] for i in event["choices"][0]["token_ids"]]
    assert ids == expected_tokens(PROMPT, 5)
    await cluster.quiet()


async def test_the_deadline_is_504_and_in_a_stream_an_event(text_folder):
    async with run_cluster(text_folder, default_timeout_s=0.8) as cluster:
        await add_pair(cluster, token_delay_s=0.05)
        async with http_client(cluster) as client:
            body = {"prompt": PROMPT, "max_tokens": 500}
            whole = await client.post("/v1/completions", json=body)
            assert whole.status_code == 504
            assert whole.json()["error"]["type"] == "timeout_error"
            stream = await client.post("/v1/completions", json={**body, "stream": True})
            assert read_events(stream.text)[-1]["error"]["code"] == "deadline_exceeded"
        await cluster.quiet()


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_D14_a_client_that_goes_away_cancels_its_requests(cluster, is_streaming):
    await add_pair(cluster, token_delay_s=0.01)
    async with http_client(cluster) as client:
        body = {"prompt": [PROMPT, PROMPT[5:]], "max_tokens": 2000, "stream": is_streaming}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 2)
        call.cancel()
        await asyncio.wait((call,))
        await cluster.quiet()


def _connect_and_post(port: int, body: dict[str, object]) -> socket.socket:
    """Sends a request over a socket with a small window and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    text = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    client.sendall(head.encode() + text)
    return client


async def test_a_slow_reader_is_cut_alone_and_its_memory_is_bounded(text_folder):
    async with run_cluster(text_folder, max_client_buffer_bytes=32768) as cluster:
        # Slow enough that a client that reads is never behind.
        await add_pair(cluster, token_delay_s=0.0005)
        assert cluster.front.http_port is not None
        body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True, "logprobs": 20}
        slow = _connect_and_post(cluster.front.http_port, body)
        async with http_client(cluster) as client:
            other = await client.post("/v1/completions", json={**STREAM, "max_tokens": 20})
        check_stream(other.text)
        await cluster.quiet()
        assert await asyncio.to_thread(_is_cut_short, slow)
        slow.close()
        assert _value(cluster, "pdserve_router_slow_readers_total") == 1.0


def _is_cut_short(client: socket.socket) -> bool:
    """Reads to the end of a connection; says whether the answer stops before its own end."""
    client.settimeout(5.0)
    tail = b""
    try:
        while part := client.recv(65536):
            tail = (tail + part)[-64:]
    except ConnectionResetError:
        return True
    return not tail.endswith(b"0\r\n\r\n")


def _value(cluster: Cluster, name: str) -> float:
    samples = [s for f in cluster.front.metrics_registry.collect() for s in f.samples]
    return sum(sample.value for sample in samples if sample.name == name)


async def test_C15_a_drain_finishes_streams_and_refuses_new_calls(cluster):
    await add_pair(cluster, token_delay_s=0.01)
    async with http_client(cluster) as client:
        body = {**STREAM, "max_tokens": 40}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
        drain = asyncio.create_task(cluster.front.drain(10.0))
        await eventually(lambda: cluster.front.intake.is_draining)
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await client.get("/health")).status_code == 503
        chunks = check_stream((await running).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        await drain


async def test_stop_ends_a_stream_with_an_error_event(cluster):
    await add_pair(cluster, token_delay_s=0.01)
    async with http_client(cluster) as client:
        body = {**STREAM, "max_tokens": 3000}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            begun = await anext(pieces)
            cluster.front.dispatcher.end_all(NoWorker("this router stopped"))
            text = begun + "".join([piece async for piece in pieces])
        assert read_events(text)[-1]["error"]["code"] == "no_worker"


async def test_pings_bridge_a_long_prefill_and_the_shape_stays(cluster):
    await cluster.add("p0")
    cluster.network.workers[next(iter(cluster.network.workers))].script.hold_first_token_s = 0.5
    await cluster.add("d0")
    await cluster.ready(2)
    for worker in cluster.network.workers.values():
        worker.script.token_delay_s = 0.4
    parts = HttpParts(
        intake=cluster.front.intake,
        desk=cluster.front.desk,
        keyring=Keyring((), b""),
        registry=type(cluster.front.metrics_registry)(),
        can_serve=lambda: True,
        max_body_bytes=1 << 20,
        ping_interval_s=0.05,
    )
    server = HttpServer(HttpFront(parts).make_app())
    port = await server.start("127.0.0.1", 0)
    try:
        async with http_client(cluster) as client:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answer = await client.post(url, json={**CHAT, "stream": True, "max_tokens": 3})
    finally:
        await server.stop(1.0)
    assert answer.text.startswith(": ping\n\n")
    check_stream(answer.text)
