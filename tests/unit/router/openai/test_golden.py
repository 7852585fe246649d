"""Golden transcripts: whole bodies, byte for byte but for ids and times.

`PDSERVE_WRITE_GOLDEN=1 pytest <this file>` writes them anew; read the difference before you commit.
"""

import json
import os
from pathlib import Path

import httpx
import pytest

from tests.support.http_client import check_stream, scrub

GOLDEN = Path(__file__).parent / "golden"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "tiny"}
TEXT = {"prompt": "the fox", "max_tokens": 4}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CASES = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat_logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat_stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat_stream_usage": ("/v1/chat/completions", {**CHAT, **USAGE}),
    "chat_stream_logprobs": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "logprobs": True},
    ),
    "chat_stream_continuous": (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "chat_parts": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
        },
    ),
    "completion": ("/v1/completions", TEXT),
    "completion_logprobs": ("/v1/completions", {**TEXT, "logprobs": 1}),
    "completion_ids": ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}),
    "completion_token_ids": ("/v1/completions", {**TEXT, "return_token_ids": True}),
    "completion_two": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
    "completion_two_of_ids": ("/v1/completions", {"prompt": [[5], [6, 7]], "max_tokens": 2}),
    "completion_stream": ("/v1/completions", {**TEXT, "stream": True}),
    "completion_stream_usage": ("/v1/completions", {**TEXT, **USAGE}),
    "completion_stream_logprobs": ("/v1/completions", {**TEXT, "stream": True, "logprobs": 0}),
    "tokenize": ("/tokenize", {"prompt": "the quick fox", "return_token_strs": True}),
    "tokenize_chat": ("/tokenize", {"messages": CHAT["messages"]}),
    "detokenize": ("/detokenize", {"tokens": [302, 345, 2]}),
    "error_field": ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    "error_model": ("/v1/completions", {**TEXT, "model": "other"}),
    "error_too_long": ("/v1/completions", {**TEXT, "max_tokens": 100_000}),
    "error_tools": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}),
}


@pytest.mark.parametrize("name", CASES)
async def test_D10_transcript_is_the_golden_one(name: str, client: httpx.AsyncClient) -> None:
    path, body = CASES[name]
    answer = await client.post(path, json=body)
    if body.get("stream"):
        check_stream(answer.text)
        # How tokens are gathered into chunks depends on timing: their joined text does not.
        found = json.dumps(_join(answer.text), indent=1, ensure_ascii=False) + "\n"
    else:
        found = f"{answer.status_code}\n{scrub(answer.text)}\n"
    path_of_golden = GOLDEN / f"{name}.txt"
    if os.environ.get("PDSERVE_WRITE_GOLDEN"):
        path_of_golden.write_text(found, encoding="utf-8")
    assert found == path_of_golden.read_text(encoding="utf-8")


def _join(body: str) -> list[object]:
    """Joins output chunks that follow each other, as one worker message might have carried them."""
    joined: list[dict[str, object]] = []
    for chunk in check_stream(scrub(body)):
        previous = joined[-1] if joined else None
        if previous is not None and _is_output(previous) and _is_output(chunk):
            _append(previous["choices"][0], chunk["choices"][0])  # type: ignore[index]
            if chunk.get("usage"):
                previous["usage"] = chunk["usage"]
        else:
            joined.append(chunk)
    return [*joined, "[DONE]"]


def _is_output(chunk: dict[str, object]) -> bool:
    return any(
        choice.get("text") or choice.get("delta", {}).get("content")
        for choice in chunk["choices"]  # type: ignore[attr-defined]
    )


def _append(first: dict[str, object], second: dict[str, object]) -> None:
    for name, value in second.items():
        if isinstance(value, dict):
            _append(first[name], value)  # type: ignore[arg-type]
        elif isinstance(value, list) or name in ("text", "content"):
            first[name] += value  # type: ignore[operator]
