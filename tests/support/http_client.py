"""An HTTP client of a router front under test, and strict readers of what it answers."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.support.fake_script import Script
from tests.support.router_harness import Cluster

Json = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def http_client(cluster: Cluster, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Opens a client of a front's HTTP port."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{cluster.front.http_port}", headers=headers, timeout=20.0
    ) as client:
        yield client


async def add_pair(cluster: Cluster, **decode: object) -> None:
    """Adds one prefill and one decode fake and waits until they can serve."""
    await cluster.add("p0")
    await cluster.add("d0", Script(**decode))
    await cluster.ready(2)


def read_events(body: str) -> list[Json | str]:
    """Reads an SSE body strictly: only `data:` events, each one line, ended by a blank one."""
    assert body.endswith("\n\n"), body[-80:]
    events: list[Json | str] = []
    for event in body[:-2].split("\n\n"):
        if event == ": ping":
            continue
        assert "\n" not in event
        assert event.startswith("data: ")
        text = event.removeprefix("data: ")
        events.append(text if text == "[DONE]" else json.loads(text))
    return events


def check_stream(body: str) -> list[Json]:
    """Checks a whole stream against the rules that clients rely on; returns its chunks."""
    events = read_events(body)
    assert events[-1] == "[DONE]"
    chunks = [event for event in events[:-1] if isinstance(event, dict)]
    assert len(chunks) == len(events) - 1
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    ended: set[int] = set()
    begun: set[int] = set()
    for number, chunk in enumerate(chunks):
        if not chunk["choices"]:
            assert number == len(chunks) - 1, "the chunk of usage is the last one"
            assert chunk["usage"]["total_tokens"] > 0
            continue
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in ended, "nothing comes behind the end of a choice"
            assert "finish_reason" in choice
            delta = choice.get("delta")
            if delta is not None and index not in begun:
                assert delta["role"] == "assistant"
            begun.add(index)
            if choice["finish_reason"] is not None:
                ended.add(index)
                assert delta in (None, {})
                assert choice.get("text", "") == ""
    assert begun == ended
    return chunks


def scrub(text: str) -> str:
    """Replaces ids and times by fixed ones."""
    text = re.sub(r"(chatcmpl|cmpl)-[0-9a-f]{32}", r"\1-ID", text)
    return re.sub(r'"created":\d+', '"created":0', text)
