"""Fields that no endpoint knows: warned of once, or refused."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.openai.compatibility import MAX_WARNED
from tests.support.http_client import CHAT, add_pair, http_client
from tests.support.router_harness import run_cluster

TEXT = {"prompt": "hello", "max_tokens": 2}
WORDS = "a secret of the prompt"
EXTRAS: dict[str, object] = {
    "top_k": 3,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "cache_salt": "s",
    "priority": 0,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": True,
    "return_token_ids": False,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "chat_template": None,
    "chat_template_kwargs": {},
    "kv_transfer_params": None,
    "user": "u",
}
"""What clients send beside OpenAI's own fields, asking for nothing that is refused."""


def with_message(**fields: object) -> dict[str, object]:
    return {"messages": [CHAT["messages"][0], {"role": "user", "content": "hi", **fields}]}


@pytest.fixture
async def strict(text_folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a front that refuses unknown fields."""
    async with run_cluster(text_folder, strict_fields=True) as cluster:
        await add_pair(cluster)
        async with http_client(cluster) as opened:
            yield opened


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if r.message == "unknown request field ignored"]
    return [record.__dict__["field_id"] for record in found]


async def test_an_unknown_field_is_warned_of_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        answer = await client.post("/v1/completions", json={**TEXT, "surprise\n": WORDS})
        assert answer.status_code == 200
    assert warned(caplog) == ["surprise_"]
    many = {f"unknown{number}": 1 for number in range(1000)}
    await client.post("/v1/completions", json={**TEXT, **many})
    assert len(warned(caplog)) == MAX_WARNED
    assert WORDS not in caplog.text


async def test_a_name_is_cut_before_it_is_told(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await client.post("/v1/completions", json={**TEXT, "x" * 60 + WORDS: 1})
    assert warned(caplog) == ["x" * 60 + "a_se"]


async def test_unknown_fields_inside_of_a_chat_are_warned_of_once_wherever_they_stand(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [{"role": "user", "content": [part, part], "mood": WORDS}] * 3,
        "stream": True,
        "stream_options": {"include_usage": True, "hurry": 1},
        "max_tokens": 1,
    }
    for _ in range(2):
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert warned(caplog) == [
        "messages.content.cache_control",
        "messages.mood",
        "stream_options.hurry",
    ]


STRANGE: list[tuple[str, dict[str, object], str]] = [
    ("/v1/completions", {**TEXT, "max_token": 3}, "max_token"),
    ("/v1/completions", {**TEXT, "x y" * 40: 3}, "x_y" * 21 + "x"),
    ("/v1/chat/completions", {**CHAT, "prompt": "x"}, "prompt"),
    ("/v1/chat/completions", with_message(mood=WORDS), "messages[1].mood"),
    (
        "/v1/chat/completions",
        with_message(content=[{"type": "text", "text": "hi", "mood": WORDS}]),
        "messages[1].content[0].mood",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
    ),
    ("/tokenize", {"prompt": "a", "fast": True}, "fast"),
    ("/detokenize", {"tokens": [5], "fast": True}, "fast"),
]
"""Path, body, and the field that it names."""


async def test_a_strict_front_refuses_an_unknown_field_by_name(strict: httpx.AsyncClient) -> None:
    for path, body, param in STRANGE:
        answer = await strict.post(path, json=body)
        assert answer.status_code == 400, param
        assert answer.json()["error"] == {
            "message": f"{param} must be a known field, got an unknown one",
            "type": "invalid_request_error",
            "param": param,
            "code": "invalid_value",
        }


async def test_a_strict_front_takes_known_extras_and_what_clients_send_back(
    strict: httpx.AsyncClient,
) -> None:
    answer = await strict.post("/v1/completions", json={**TEXT, **EXTRAS, "surprise": None})
    assert answer.status_code == 200, answer.text
    told = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "hm",
    }
    body = {
        "messages": [{**CHAT["messages"][0], "name": "me"}, told, CHAT["messages"][0]],
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "max_tokens": 1,
        **EXTRAS,
    }
    answer = await strict.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
