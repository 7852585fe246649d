"""n > 1 over HTTP: indices, ends, usage, limits."""

import pytest
from openai import AsyncOpenAI

from tests.support.fake_tokens import expected_tokens
from tests.support.http_client import CHAT, add_pair, check_stream, http_client

PROMPT = list(range(10, 50))
BODY = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}


def ids_by_index(chunks):
    ids = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return ids


def all_expected(prompt, n, count=5):
    return {index: expected_tokens(prompt, count, index) for index in range(n)}


@pytest.mark.parametrize("n", range(1, 9))
async def test_A13_n_choices_whole_and_streamed(client, pair, n):
    whole = (await client.post("/v1/completions", json={**BODY, "n": n})).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert {c["index"]: c["token_ids"] for c in whole["choices"]} == all_expected(PROMPT, n)
    body = {**BODY, "n": n, "stream": True, "stream_options": {"include_usage": True}}
    chunks = check_stream((await client.post("/v1/completions", json=body)).text)
    assert ids_by_index(chunks) == all_expected(PROMPT, n)
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 5 * n)
        assert usage["total_tokens"] == 40 + 5 * n
    await pair.quiet()


@pytest.mark.parametrize("n", [2, 8])
async def test_A13_n_choices_of_a_chat(client, n):
    body = {**CHAT, "max_tokens": 3, "n": n}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
    texts = dict.fromkeys(range(n), "")
    for choice in (c for chunk in check_stream(answer.text) for c in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == 3 * n


async def test_A13_choices_of_several_prompts_are_numbered_through(client, pair):
    prompts = [PROMPT, PROMPT[3:], PROMPT[7:]]
    body = {**BODY, "prompt": prompts, "n": 2}
    expected = {
        2 * position + index: ids
        for position, prompt in enumerate(prompts)
        for index, ids in all_expected(prompt, 2).items()
    }
    whole = (await client.post("/v1/completions", json=body)).json()
    assert {c["index"]: c["token_ids"] for c in whole["choices"]} == expected
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    answer = await client.post("/v1/completions", json={**body, "stream": True})
    assert ids_by_index(check_stream(answer.text)) == expected
    await pair.quiet()


async def test_A13_some_samples_end_on_their_first_token(client, pair):
    """The stop id is what sample 1 begins with; nobody else begins with it."""
    firsts = [expected_tokens(PROMPT, 1, index)[0] for index in range(4)]
    stop_id = firsts[1]
    assert firsts.count(stop_id) == 1
    body = {**BODY, "n": 4, "stop_token_ids": [stop_id]}
    whole = (await client.post("/v1/completions", json=body)).json()
    short = whole["choices"][1]
    assert (short["finish_reason"], short["stop_reason"]) == ("stop", stop_id)
    assert (short["token_ids"], short["text"]) == ([stop_id], "")
    long = {c["index"]: c["token_ids"] for c in whole["choices"] if c["index"] != 1}
    expected = all_expected(PROMPT, 4)
    assert long == {index: expected[index] for index in (0, 2, 3)}
    assert whole["usage"]["completion_tokens"] == 16
    answer = await client.post("/v1/completions", json={**body, "stream": True})
    chunks = check_stream(answer.text)
    assert ids_by_index(chunks) == {**long, 1: [stop_id]}
    await pair.quiet()


async def test_A13_all_samples_may_end_on_their_first_token(client, pair):
    body = {**BODY, "n": 8, "max_tokens": 1}
    answer = await client.post("/v1/completions", json={**body, "stream": True})
    assert ids_by_index(check_stream(answer.text)) == all_expected(PROMPT, 8, 1)
    await pair.quiet()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_D5_nine_samples_are_refused_with_field_value_and_limit(client, path):
    body = {**(CHAT if "chat" in path else BODY), "n": 9}
    error = (await client.post(path, json=body)).json()["error"]
    assert error["param"] == "n"
    assert error["message"] == "n must be from 1 to 8, got 9"


async def test_the_model_may_be_left_out(client):
    answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"


async def test_A13_the_sdk_streams_n_choices(pair):
    url = f"http://127.0.0.1:{pair.front.http_port}/v1"
    async with AsyncOpenAI(api_key="x", base_url=url, max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(
            model="tiny", messages=CHAT["messages"], n=3, max_tokens=4, stream=True
        )
        chunks = [chunk async for chunk in stream]
        whole = await sdk.chat.completions.create(
            model="tiny", messages=CHAT["messages"], n=3, max_tokens=4
        )
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason


async def test_D14_a_failed_sample_ends_the_whole_call(cluster):
    await add_pair(cluster, fail_before=3)
    async with http_client(cluster) as client:
        answer = await client.post("/v1/completions", json={**BODY, "n": 4})
    assert answer.status_code == 500
    await cluster.quiet()
