"""The client of the serving benchmark, a process of its own: sends requests, times their tokens.

`python -m benchmarks.serving_load HOST:PORT`, orders as JSON lines on stdin, one answer a line on
stdout. An order is a `LoadPoint`; requests go to /v1/completions, prompts are random token ids that
nobody has cached, answers are Server-Sent Events with the ids of their tokens. Times are of the
monotonic clock, which all processes of a machine share.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

FIRST_ID, END_ID = 300, 120_000
"""Prompts are drawn from these, unless a load point says otherwise."""
_EVENT_END = b"\n\n"
_DATA = b"data: "


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """What to send."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float | None
    """Poisson arrivals; None: one at a time."""
    seed: int
    end_id: int = END_ID
    """Prompts are drawn from ids below."""


@dataclass(kw_only=True)
class Answered:
    """When the tokens of one request came."""

    request_id: str = ""
    sent_s: float
    at_s: list[float] = field(default_factory=list)
    """Of each event that carried tokens."""
    num_tokens: list[int] = field(default_factory=list)
    """In each of them."""
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None


class EventReader:
    """Cuts the bytes of a chunked HTTP answer into events and notes their tokens."""

    def __init__(self, answered: Answered) -> None:
        """Fills `answered`."""
        self._answered = answered
        self._buffer = b""
        self.is_done = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes what came at a time."""
        events = (self._buffer + data).split(_EVENT_END)
        self._buffer = events.pop()
        for event in events:
            start = event.find(_DATA)
            if start >= 0:
                self._take(event[start + len(_DATA) :], now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(payload)
        answered = self._answered
        if "error" in event:
            answered.error = str(event["error"])
            return
        answered.request_id = event["id"]
        ids = [one for choice in event["choices"] for one in choice.get("token_ids", ())]
        if ids:
            answered.at_s.append(now_s)
            answered.num_tokens.append(len(ids))
            answered.token_ids += ids


def make_bodies(point: LoadPoint) -> Iterator[bytes]:
    """Makes the bodies of a load point's requests; no two prompts begin alike."""
    numbers = random.Random(point.seed)
    for _ in range(point.num_requests):
        prompt = [numbers.randrange(FIRST_ID, point.end_id) for _ in range(point.prompt_tokens)]
        body = {
            "prompt": prompt,
            "max_tokens": point.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        yield json.dumps(body).encode()


def make_gaps(point: LoadPoint) -> Iterator[float]:
    """Draws the times between arrivals."""
    numbers = random.Random(point.seed + 1)
    assert point.rate_per_s is not None
    while True:
        yield numbers.expovariate(point.rate_per_s)


async def ask(host: str, port: int, body: bytes) -> Answered:
    """Sends one request on a connection of its own and reads its answer to the end."""
    answered = Answered(sent_s=time.monotonic())
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        answered.error = str(error)
        return answered
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    events = EventReader(answered)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            answered.error = (status + await reader.read(4096)).decode(errors="replace")
            return answered
        while data := await reader.read(65536):
            events.feed(data, time.monotonic())
        if not events.is_done and answered.error is None:
            answered.error = "the answer ended too early"
    except OSError as error:
        answered.error = str(error)
    finally:
        writer.close()
    return answered


async def run_point(host: str, port: int, point: LoadPoint) -> list[Answered]:
    """Sends all requests of a load point and waits for their answers."""
    bodies = list(make_bodies(point))
    if point.rate_per_s is None:
        return [await ask(host, port, body) for body in bodies]
    tasks = []
    due_s = time.monotonic()
    for body, gap_s in zip(bodies, make_gaps(point), strict=False):
        due_s += gap_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(host, port, body)))
    return list(await asyncio.gather(*tasks))


def main(arguments: Sequence[str] | None = None) -> None:
    """Obeys orders until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    host, _, port = parser.parse_args(arguments).address.rpartition(":")
    for line in sys.stdin:
        point = LoadPoint(**json.loads(line))
        before_s = time.process_time()
        found = asyncio.run(run_point(host, int(port), point))
        cpu_s = time.process_time() - before_s
        answer = {"cpu_s": cpu_s, "requests": [asdict(one) for one in found]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
