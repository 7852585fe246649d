"""Bodies that are refused: each names its field, none costs memory, the next call is served."""

import asyncio
import gc
import json
import re

import psutil
import pytest

from router.openai.compatibility import IGNORED, REFUSED, SUPPORTED
from router.openai.fields import Fields
from tests.support.http_client import CHAT, add_pair, http_client
from tests.support.router_harness import let_others_run, run_cluster

TEXT = {"prompt": "the fox", "max_tokens": 2}
BAD_COMMON = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("min_p", -0.5),
    ("seed", 2**64),
    ("seed", "x"),
    ("n", 0),
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", 10**30),
    ("max_tokens", 5000),
    ("min_tokens", -1),
    ("stop", 7),
    ("stop[0]", [7]),
    ("stop[0]", [""]),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [384]),
    ("stop_token_ids[0]", [-1]),
    ("stop_token_ids[1]", [1, True]),
    ("ignore_eos", 1),
    ("presence_penalty", 3),
    ("frequency_penalty", "x"),
    ("repetition_penalty", 0),
    ("logit_bias", [1]),
    ("logit_bias", {"one": 1}),
    ("logit_bias[1]", {"1": "x"}),
    ("prompt_logprobs", -1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("cache_salt", "x" * 257),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("structured_outputs", {"regex": "a"}),
    ("best_of", 2),
    ("kv_transfer_params", {}),
    ("chat_template", "{{ x }}"),
    ("chat_template_kwargs", {"a": 1}),
    ("truncate_prompt_tokens", 5),
    ("priority", 1),
    ("allowed_token_ids", [1]),
    ("bad_words", ["x"]),
]


def _field_of(param: str) -> str:
    return param.partition("[")[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_D4_each_bad_field_is_400_and_named(client, path):
    for param, value in BAD_COMMON:
        body = {**(CHAT if "chat" in path else TEXT), _field_of(param): value}
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, (param, answer.text)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(param)
        assert len(error["message"]) < 400


BAD_CHAT = [
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"content": "hi"}]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    (
        "messages[1].content[0].type",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            ]
        },
    ),
    (
        "messages[0].tool_calls",
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
    ),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logprobs", {"logprobs": 3}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("echo", {"echo": True}),
]


async def test_D1_D4_each_bad_chat_field_is_400_and_named(client):
    headers = {"content-type": "application/json"}
    for param, change in BAD_CHAT:
        content = json.dumps({**CHAT, **change}).encode("ascii")
        answer = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


BAD_TEXT = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [384]}),
    ("prompt[1]", {"prompt": [1, "a"]}),
    ("prompt[1]", {"prompt": [1, -1]}),
    ("prompt[0]", {"prompt": [True]}),
    ("prompt[1]", {"prompt": ["a", ""]}),
    ("prompt[1]", {"prompt": ["a", 5]}),
    ("prompt[1]", {"prompt": [[5], []]}),
    ("prompt", {"prompt": ["a"] * 257}),
    ("prompt", {"prompt": [5] * 4096}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("suffix", {"suffix": "x"}),
]


async def test_D1_D4_each_bad_completion_field_is_400_and_named(client, pair):
    for param, change in BAD_TEXT:
        answer = await client.post("/v1/completions", json={**TEXT, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        await pair.quiet()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' * 40 + b"1" + b"}" * 40,
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": [' + b"[]," * 600_000 + b"[]]}",
    ],
)
async def test_D5_a_body_that_is_no_small_json_object_is_400(client, body):
    headers = {"content-type": "application/json"}
    answer = await client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"
    assert len(answer.content) < 500
    assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


async def test_D5_a_large_body_is_413_whether_announced_or_not(text_folder):
    async with run_cluster(text_folder, max_request_bytes=100_000) as cluster:
        await add_pair(cluster)
        async with http_client(cluster) as client:

            async def pieces():
                for _ in range(20):
                    yield b"x" * 10_000

            headers = {"content-type": "application/json"}
            for content in (b"x" * 200_000, pieces()):
                answer = await client.post("/v1/completions", content=content, headers=headers)
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "body_too_large"
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
JSON_HEAD = HEAD + b"content-type: application/json\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"\r\nZZ\r\n"],
        [JSON_HEAD + b"\r\nZZ\r\n"],
        [JSON_HEAD + b"\r\n", b"2\r\n{}\r\nZZ\r\n"],
        [HEAD + b"\r\n", b"ZZ\r\n"],
    ],
    ids=["before a refusal", "before the body is read", "while it is read", "behind a refusal"],
)
async def test_D5_bytes_that_are_no_chunk_end_one_connection_and_log_no_defect(
    pair, client, caplog, pieces
):
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.front.http_port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await let_others_run(20)
    answer = await asyncio.wait_for(reader.read(), 30.0)
    writer.close()
    assert re.match(rb"HTTP/1.1 (400|415) ", answer)
    assert answer.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


async def test_D5_a_request_of_two_lengths_is_400_and_ends_its_connection(pair, client):
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.front.http_port)
    writer.write(JSON_HEAD + b"content-length: 5\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 30.0)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"two_lengths" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


BOMBS = {
    "n": {"n": 163_840},
    "stop": {"stop": ["x"] * 160},
    "stop length": {"stop": ["x" * 2560]},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(10_240)}},
    "stop_token_ids": {"stop_token_ids": [1] * 1280},
    "logprobs": {"logprobs": 200},
    "prompt_logprobs": {"prompt_logprobs": 2**31 - 1},
    "prompts": {"prompt": ["a"] * 2560},
    "max_tokens": {"max_tokens": 40_960},
}


@pytest.mark.parametrize("name", BOMBS)
async def test_D5_ten_times_a_cap_is_refused_before_it_costs_memory(client, name):
    body = {**TEXT, **BOMBS[name]}
    await client.post("/v1/completions", json=body)

    async def grow() -> int:
        """Asks five times; returns by how much this process has grown."""
        gc.collect()
        before = psutil.Process().memory_info().rss
        for _ in range(5):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400
        gc.collect()
        return psutil.Process().memory_info().rss - before

    # What is kept is kept each time; other threads of this process may grow now and then.
    grown = [await grow()]
    while grown[-1] >= 1 << 20 and len(grown) < 3:
        grown.append(await grow())
    assert min(grown) < 1 << 20


async def test_another_content_type_is_415(client):
    content = json.dumps(TEXT).encode()
    for media_type in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"content-type": media_type}
        answer = await client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 415


async def test_the_queue_limit_is_429_with_retry_after(text_folder):
    async with run_cluster(text_folder, max_in_flight=0) as cluster, http_client(cluster) as client:
        answer = await client.post("/v1/completions", json=TEXT)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_a_defect_is_500_and_shows_nothing(client, pair, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise KeyError("inner detail")

    monkeypatch.setattr(pair.front.dispatcher, "start", fail)
    answer = await client.post("/v1/completions", json=TEXT)
    assert answer.status_code == 500
    assert "inner" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"


NEUTRAL = [(name, value) for name, values in REFUSED.items() for value in (*values, None)]


async def test_each_refused_field_may_be_given_its_neutral_value(client):
    for name, value in NEUTRAL:
        answer = await client.post("/v1/completions", json={**TEXT, name: value})
        assert answer.status_code == 200, answer.text


async def test_ignored_fields_change_nothing(client):
    plain = (await client.post("/v1/completions", json=TEXT)).json()
    extra = dict.fromkeys(IGNORED, "x")
    found = (await client.post("/v1/completions", json={**TEXT, **extra})).json()
    assert found["choices"] == plain["choices"]


async def test_vllm_extras_of_benches_are_honoured(client):
    body = {
        **TEXT,
        "max_tokens": 30,
        "min_tokens": 30,
        "ignore_eos": True,
        "top_k": -1,
        "seed": -5,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
    }
    answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["choices"][0]["finish_reason"] == "length"


def test_no_field_is_in_two_lists() -> None:
    for fields in SUPPORTED.values():
        assert set(fields) & IGNORED <= {"add_generation_prompt"}
        assert set(fields) & set(REFUSED) <= {"echo"}
    assert not IGNORED & set(REFUSED)


def test_null_is_the_same_as_absent() -> None:
    fields = Fields({"temperature": None, "stop": None, "stream": None})
    assert fields.number("temperature") is None
    assert fields.flag("stream") is None
    assert not fields.has("stop")
    assert fields.unread() == []


@pytest.mark.parametrize(
    ("stop", "param"),
    [("", "stop"), ("x" * 257, "stop"), ([""], "stop[0]"), (["a", ""], "stop[1]")],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stop_string_is_named_as_it_was_written(client, path, stop, param):
    body = {**(CHAT if "chat" in path else TEXT), "stop": stop}
    error = (await client.post(path, json=body)).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} must be of 1 to 256 characters, got ")
