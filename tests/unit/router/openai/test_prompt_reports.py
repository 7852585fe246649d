"""What an answer tells of its prompt: `echo`, its log-probs, `prompt_logprobs`."""

import json

import pytest
from openai import AsyncOpenAI

from router.openai.json_parts import PART_CHARACTERS, Encoded, Parts, json_parts
from tests.support.fake_sequence import prompt_logprob
from tests.support.http_client import CHAT, check_stream

PROMPT = list(range(10, 20))
ECHO = {"prompt": PROMPT, "max_tokens": 3, "echo": True}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def post(client, body, path="/v1/completions"):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client, body, path="/v1/completions"):
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return check_stream(answer.text)


def join(chunks, index):
    """Joins the chunks of one choice as a client would."""
    joined = {"text": "", "logprobs": None, "prompt_logprobs": []}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        joined["text"] += choice["text"]
        joined["prompt_logprobs"] += choice.get("prompt_logprobs", [])
        if choice["logprobs"] is not None:
            lists = joined["logprobs"] or {name: [] for name in LISTS}
            joined["logprobs"] = {name: lists[name] + choice["logprobs"][name] for name in LISTS}
    return joined


async def test_A14_echo_puts_the_prompt_before_the_output(client, pair):
    plain = (await post(client, {**ECHO, "echo": False}))["choices"][0]["text"]
    asked = {"tokens": PROMPT}
    prompt_text = (await client.post("/detokenize", json=asked)).json()["prompt"]
    found = await post(client, ECHO)
    assert found["choices"][0]["text"] == prompt_text + plain
    assert found["choices"][0]["logprobs"] is None
    assert found["usage"]["prompt_tokens"] == 10
    assert found["usage"]["completion_tokens"] == 3
    await pair.quiet()


async def test_A14_echo_with_logprobs_scores_prompt_and_output_the_first_token_is_null(client):
    choice = (await post(client, {**ECHO, "logprobs": 1}))["choices"][0]
    logprobs = choice["logprobs"]
    assert [len(logprobs[name]) for name in LISTS] == [13] * 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:10] == [prompt_logprob(p) for p in range(1, 10)]
    assert logprobs["token_logprobs"][10:] == [0.0, -1.0, -2.0]
    # The token itself, and one alternative.
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"][1:])
    assert "prompt_logprobs" not in choice


async def test_text_offsets_point_into_the_echoed_text(client):
    found = await post(client, {"prompt": "the quick fox", "max_tokens": 2, "echo": True} | TOP)
    choice = found["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    tokens = choice["logprobs"]["tokens"]
    assert offsets[0] == 0
    for token, offset in zip(tokens[:-2], offsets, strict=False):
        assert choice["text"][offset:].startswith(token)


TOP = {"logprobs": 0}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"logprobs": 1, "prompt_logprobs": 3},
        {"logprobs": 3, "prompt_logprobs": 1},
        {"logprobs": 1, "echo": False, "prompt_logprobs": 0},
        {"logprobs": 1, "n": 3},
        {"logprobs": 0, "prompt": [PROMPT, PROMPT[:4], PROMPT[:1]], "prompt_logprobs": 0},
    ],
)
async def test_A14_a_stream_says_of_the_prompt_what_a_whole_answer_says(client, pair, extra):
    body = {**ECHO, **extra}
    whole = (await post(client, body))["choices"]
    chunks = await stream(client, body)
    for choice in whole:
        joined = join(chunks, choice["index"])
        assert joined["text"] == choice["text"]
        assert joined["logprobs"] == choice["logprobs"]
        assert joined["prompt_logprobs"] == choice.get("prompt_logprobs", [])
    await pair.quiet()


async def test_prompt_logprobs_have_the_shape_of_vllm(client):
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2}
    choice = (await post(client, body))["choices"][0]
    assert choice["logprobs"] is None
    scores = choice["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == 10
    for position, (token_id, entries) in enumerate(zip(PROMPT[1:], scores[1:], strict=True), 1):
        assert set(entries) == {str(token_id), "3", "4"}
        entry = entries[str(token_id)]
        assert entry["logprob"] == prompt_logprob(position)
        assert entry["rank"] is None
        assert isinstance(entry["decoded_token"], str)
        assert (entries["3"]["logprob"], entries["3"]["rank"]) == (0.0, 1)


async def test_each_asks_for_its_own_number_of_alternatives(client):
    body = {**ECHO, "logprobs": 1, "prompt_logprobs": 3}
    choice = (await post(client, body))["choices"][0]
    assert max(len(top) for top in choice["logprobs"]["top_logprobs"][1:]) == 2
    assert max(len(entries) for entries in choice["prompt_logprobs"][1:]) == 4


async def test_a_prompt_of_one_token_has_one_null(client):
    body = {"prompt": [7], "max_tokens": 2, "prompt_logprobs": 1}
    assert (await post(client, body))["choices"][0]["prompt_logprobs"] == [None]
    assert join(await stream(client, body), 0)["prompt_logprobs"] == [None]


async def test_chat_tells_prompt_logprobs_beside_its_choices(client):
    body = {**CHAT, "max_tokens": 2, "n": 2, "prompt_logprobs": 1}
    whole = await post(client, body, "/v1/chat/completions")
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert whole["prompt_logprobs"][0] is None
    assert not any("prompt_logprobs" in choice for choice in whole["choices"])
    chunks = await stream(client, body, "/v1/chat/completions")
    pieces = [one for chunk in chunks for one in chunk.get("prompt_logprobs", ())]
    assert pieces == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in chunks[3:])


async def test_echo_of_nothing_but_the_prompt_is_refused_by_name(client):
    answer = await client.post("/v1/completions", json={**ECHO, "max_tokens": 0, "logprobs": 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "max_tokens")
    assert "at least 1" in error["message"]


@pytest.mark.parametrize(
    ("param", "extra"),
    [
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": 20, "prompt": [5] * 4000, "n": 8}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 20, "prompt": [[5] * 2000] * 7}),
        ("echo", {"prompt": [[5] * 2000] * 20, "n": 8}),
    ],
)
async def test_D5_what_is_told_of_prompts_is_bounded_over_all_choices(client, pair, param, extra):
    answer = await client.post("/v1/completions", json={**ECHO, **extra})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    await pair.quiet()


async def test_A14_the_sdk_reads_echo_and_prompt_logprobs(pair):
    url = f"http://127.0.0.1:{pair.front.http_port}/v1"
    async with AsyncOpenAI(api_key="x", base_url=url, max_retries=0) as sdk:
        request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1}
        extra = {"prompt_logprobs": 1}
        whole = (await sdk.completions.create(**request, extra_body=extra)).choices[0]
        chunks = [
            chunk.choices[0]
            async for chunk in await sdk.completions.create(
                **request, extra_body=extra, stream=True
            )
        ]
    assert whole.logprobs.token_logprobs[0] is None
    assert len(whole.logprobs.token_logprobs) == 12
    assert len(whole.prompt_logprobs) == 10
    assert "".join(chunk.text for chunk in chunks) == whole.text
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.token_logprobs]
    assert streamed == whole.logprobs.token_logprobs


async def test_a_long_prompt_is_told_in_pieces_and_complete(client):
    body = {"prompt": [5 + i % 300 for i in range(3000)], "max_tokens": 1, "echo": True}
    chunks = await stream(client, {**body, "logprobs": 2})
    scored = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert len(scored) > 3
    assert sum(len(one["tokens"]) for one in scored) == 3001
    whole = (await post(client, {**body, "logprobs": 2}))["choices"][0]["logprobs"]
    assert [one for lists in scored for one in lists["text_offset"]] == whole["text_offset"]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
def test_json_in_parts_is_the_same_json(length):
    values = list(range(length))
    plain = {"a": values, "b": {"c": [str(v) for v in values], "d": {}}, "e": None, "f": "ü"}
    lazy = {
        "a": Parts(values[2:], int, values[:2]),
        "b": {"c": Parts(values, str), "d": {}},
        "e": Encoded((b"nu", b"ll")),
        "f": "ü",
    }
    for value in (plain, lazy):
        text = b"".join(json_parts(value))
        assert json.loads(text) == plain
        assert b" " not in text


@pytest.mark.parametrize("character", ["x", '"', "\\", "\n", "ü", "🙂", "\u2028"])
@pytest.mark.parametrize("length", [PART_CHARACTERS, PART_CHARACTERS + 1, 3 * PART_CHARACTERS])
def test_a_long_text_in_parts_is_the_same_json(character, length):
    value = {"text": character * length}
    parts = list(json_parts(value))
    assert json.loads(b"".join(parts)) == value
    assert max(map(len, parts)) <= 6 * PART_CHARACTERS
