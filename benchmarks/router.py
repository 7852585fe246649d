"""What the router costs: CPU per token, tokens per second, stalls, added time to first token.

`python -m benchmarks.router [cpu|ratio|http|stall|ttft|metrics ...]`: all parts without arguments.
`python -m benchmarks.router --fronts 1 2`: throughput with so many fronts, in a file of its own.
The router is the real one, with Redis, admission, metrics, detokenization and a stop string in each
request; only the worker has no model (`token_source`). All three processes share the machine.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import uvloop

from benchmarks.grpc_floor import serving_floor
from benchmarks.processes import cpu_s, percentile, spread
from benchmarks.report import Row, write
from benchmarks.router_fronts import FRONTS_WORKLOAD, measure_fronts
from benchmarks.router_site import (
    LONG_PROMPT_TOKENS,
    PROMPT,
    STOP,
    Site,
    client,
    make_folder,
    make_request,
    serving,
)
from benchmarks.streams import NUM_RUNS, NUM_STREAMS, OUTPUT_TOKENS, PACED_S, read_stream
from pdserve.request import FrontId, HandoffId, Request, RequestId, SamplingParams
from pdserve.rpc.codec import request_to_wire
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, types_pb2, worker_pb2, worker_pb2_grpc

NUM_PAIRS = 5
WORKLOAD = (
    f"{NUM_STREAMS} streams of {OUTPUT_TOKENS} tokens, prompts of {len(PROMPT)} ids, one stop "
    "string each; one fake decode worker; router, worker and client on the same cores; medians of "
    f"{NUM_RUNS} runs"
)


async def grpc_load(site: Site) -> tuple[int, int]:
    """Runs all streams over gRPC; returns tokens and messages."""
    async with client(site) as stub:
        calls = [stub.Generate(make_request()) for _ in range(NUM_STREAMS)]
        found = await asyncio.gather(*(read_stream(call) for call in calls))
    return sum(tokens for tokens, _ in found), sum(messages for _, messages in found)


async def http_load(site: Site) -> tuple[int, int]:
    """Runs all streams over HTTP with Server-Sent Events."""
    body = json.dumps(
        {
            "prompt": PROMPT,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stop": [STOP],
        }
    ).encode()
    found = await asyncio.gather(*(post(site, body) for _ in range(NUM_STREAMS)))
    # Each stream ends with a chunk that has no output, and [DONE].
    return NUM_STREAMS * OUTPUT_TOKENS, sum(answer.count(b"data: ") - 1 for answer in found)


async def post(site: Site, body: bytes) -> bytes:
    """Posts a completion and returns the raw answer."""
    host, port = site.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {site.http}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    assert b"200 OK" in answer[:20], answer[:400]
    return answer


Load = Callable[[Site], Awaitable[tuple[int, int]]]


async def measure_load(site: Site, load: Load) -> dict[str, float]:
    """Runs a load once and returns what it cost the router."""
    cpu_before_s, before_s = cpu_s(site.pid), time.monotonic()
    num_tokens, num_messages = await load(site)
    wall_s, used_s = time.monotonic() - before_s, cpu_s(site.pid) - cpu_before_s
    assert num_tokens == NUM_STREAMS * OUTPUT_TOKENS, num_tokens
    return {
        "us_per_token": used_s / num_tokens * 1e6,
        "tokens_per_s": num_tokens / wall_s,
        "messages_per_token": num_messages / num_tokens,
    }


def measure_cpu(folder: Path, load: Load, name: str, bounds: tuple[float | None, ...]) -> list[Row]:
    """Measures one protocol: at an engine's pace, and as fast as the machine goes."""
    rows = []
    for interval_s, pace in ((PACED_S, f"a step each {PACED_S * 1e3:g} ms"), (0.0, "full speed")):
        with serving(folder, interval_s) as site, ExitStack() as stack:
            if not interval_s:
                stack.enter_context(spread(site.pid, site.worker_pid))
            uvloop.run(measure_load(site, load))
            runs = [uvloop.run(measure_load(site, load)) for _ in range(NUM_RUNS)]
        details: dict[str, object] = {key: [round(run[key], 3) for run in runs] for key in runs[0]}
        row_name = f"{name}: router CPU per token, one message per token, {pace}"
        value = statistics.median(run["us_per_token"] for run in runs)
        rows.append(Row(name=row_name, value=value, unit="us", bound=bounds[0], details=details))
    # Of the runs at full speed.
    rows.append(
        Row(
            name=f"{name}: tokens per second",
            value=statistics.median(run["tokens_per_s"] for run in runs),
            unit="tokens/s",
            bound=bounds[1],
            better="higher",
            details=details,
        )
    )
    return rows


def measure_ratio(folder: Path) -> list[Row]:
    """Measures what the router adds to a server that does nothing but write, turn by turn."""
    with serving_floor() as floor, serving(folder, PACED_S) as site:
        uvloop.run(floor.measure_us())
        uvloop.run(measure_load(site, grpc_load))
        pairs = []
        for _ in range(NUM_PAIRS):
            floor_us = uvloop.run(floor.measure_us())
            router = uvloop.run(measure_load(site, grpc_load))
            pairs.append((router["us_per_token"], floor_us))
    return [
        Row(
            name="gRPC: router CPU per token / bare grpc.aio writer",
            value=statistics.median(router_us / floor_us for router_us, floor_us in pairs),
            unit="x",
            bound=1.3,
            details={
                "router_us": [round(router_us, 1) for router_us, _ in pairs],
                "floor_us": [round(floor_us, 1) for _, floor_us in pairs],
            },
        )
    ]


def measure_stalls(folder: Path) -> list[Row]:
    """Measures how long the loop stands while a long prompt arrives, beside 8 slow streams."""
    ids = [1000 + number % 40_000 for number in range(LONG_PROMPT_TOKENS)]
    body = json.dumps({"prompt": ids, "max_tokens": 1}).encode()
    text = " ".join(["word"] * LONG_PROMPT_TOKENS)
    text_body = json.dumps({"prompt": text[: 4 * LONG_PROMPT_TOKENS], "max_tokens": 1}).encode()
    request = make_request(ids, 1)
    echo_request = make_request(ids, 1)
    echo_request.sampling.echo = True
    # As many entries as one answer may have.
    told = {"max_tokens": 1, "prompt_logprobs": 0}
    echo_body = json.dumps({"prompt": ids, "echo": True, **told}).encode()
    scored_body = json.dumps({"prompt": ids[:12_000], **told, "prompt_logprobs": 20}).encode()
    stream_body = json.dumps(
        {"prompt": ids, "echo": True, "logprobs": 0, **told, "stream": True}
    ).encode()

    def by_grpc(request: inference_pb2.GenerateRequest) -> Callable[[Site], Awaitable[None]]:
        async def act(site: Site) -> None:
            async with client(site) as stub:
                await read_stream(stub.Generate(request))

        return act

    def by_http(body: bytes) -> Callable[[Site], Awaitable[None]]:
        async def act(site: Site) -> None:
            await post(site, body)

        return act

    async def nothing(site: Site) -> None:
        await asyncio.sleep(0.5)

    rows = []
    with serving(folder, 0.02, is_watched=True) as site:
        for name, act, bound in (
            ("nothing arrives (the machine's own noise)", nothing, None),
            ("131,072 token ids over gRPC", by_grpc(request), 20.0),
            ("131,072 token ids over HTTP", by_http(body), 20.0),
            ("half a megabyte of text over HTTP", by_http(text_body), 20.0),
            ("131,072 token ids and their echo over gRPC", by_grpc(echo_request), 20.0),
            ("131,072 token ids, echo and log-probs over HTTP", by_http(echo_body), 20.0),
            ("the same as a stream", by_http(stream_body), 20.0),
            ("12,000 token ids with 20 log-probs each over HTTP", by_http(scored_body), 20.0),
        ):
            rows.append(_stall_row(site, name, act, bound))
    return rows


def _stall_row(
    site: Site, name: str, act: Callable[[Site], Awaitable[None]], bound: float | None
) -> Row:
    assert site.stalls is not None
    walls_ms, cpus_ms = [], []
    for _ in range(5):
        before_s = time.monotonic()
        uvloop.run(_beside_streams(site, act))
        lines = [line.split() for line in site.stalls.read_text().splitlines()]
        late = [(float(w), float(c)) for at, w, c in lines if before_s < float(at)]
        walls_ms.append(1e3 * max((wall for wall, _ in late), default=0.0))
        cpus_ms.append(1e3 * max((cpu for _, cpu in late), default=0.0))
    return Row(
        name=f"longest loop stall: {name}",
        value=statistics.median(walls_ms),
        unit="ms",
        bound=bound,
        details={
            "wall_ms": [round(one, 1) for one in walls_ms],
            "loop_cpu_ms": [round(one, 1) for one in cpus_ms],
        },
    )


async def _beside_streams(site: Site, act: Callable[[Site], Awaitable[None]]) -> None:
    async with client(site) as stub:
        calls = [stub.Generate(make_request(num_tokens=10_000)) for _ in range(8)]
        readers = [asyncio.create_task(read_stream(call)) for call in calls]
        await asyncio.sleep(0.3)
        await act(site)
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def measure_ttft(folder: Path) -> list[Row]:
    """Measures the time to first token through the router and straight from the worker."""
    with serving(folder, 0.0) as site:
        through, direct = uvloop.run(_ttfts(site, 200))
    added_ms = 1e3 * (percentile(through, 0.5) - percentile(direct, 0.5))
    details = {
        "through_router_p50_ms": round(1e3 * percentile(through, 0.5), 3),
        "through_router_p99_ms": round(1e3 * percentile(through, 0.99), 3),
        "direct_p50_ms": round(1e3 * percentile(direct, 0.5), 3),
    }
    return [Row(name="added TTFT p50", value=added_ms, unit="ms", bound=3.0, details=details)]


async def _ttfts(site: Site, count: int) -> tuple[list[float], list[float]]:
    through, direct = [], []
    async with client(site) as stub, open_channel(site.worker) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        stream = worker.Stream(worker_pb2.StreamRequest(front_id="direct"))
        await stream.read()
        for number in range(count):
            before_s = time.monotonic()
            call = stub.Generate(make_request(num_tokens=1))
            await call.read()
            through.append(time.monotonic() - before_s)
            while await call.read() is not grpc.aio.EOF:
                pass
            submit = worker_pb2.SubmitRequest(request=_spec(number))
            before_s = time.monotonic()
            pending = worker.Submit(submit)
            while not (await stream.read()).updates:
                pass
            direct.append(time.monotonic() - before_s)
            await pending
    return through[10:], direct[10:]


def _spec(number: int) -> types_pb2.RequestSpec:
    return request_to_wire(
        Request(
            request_id=RequestId(f"direct-{number}"),
            token_ids=tuple(PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=SamplingParams(max_tokens=1),
            handoff_id=HandoffId("direct"),
            front_id=FrontId("direct"),
        )
    )


def measure_scrape(folder: Path) -> list[Row]:
    """Measures one scrape of /metrics after some traffic."""
    with serving(folder, 0.0) as site:
        uvloop.run(grpc_load(site))
        rows = []
        for name, address in (("metrics port", site.metrics), ("HTTP front", site.http)):
            times_ms = []
            for _ in range(30):
                before_s = time.monotonic()
                with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                    answer.read()
                times_ms.append(1e3 * (time.monotonic() - before_s))
            value = statistics.median(times_ms)
            rows.append(Row(name=f"/metrics scrape, {name}", value=value, unit="ms", bound=5.0))
    return rows


PARTS: dict[str, Callable[[Path], list[Row]]] = {
    "cpu": lambda folder: measure_cpu(folder, grpc_load, "gRPC", (60.0, 12_000.0)),
    "ratio": measure_ratio,
    "http": lambda folder: measure_cpu(folder, http_load, "HTTP", (None, None)),
    "stall": measure_stalls,
    "ttft": measure_ttft,
    "metrics": measure_scrape,
}


def main() -> None:
    """Runs the parts named on the command line, or all, and writes what is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--fronts", type=int, nargs="+", help="instead of parts: how many, in turn")
    arguments = parser.parse_args()
    names = arguments.parts or list(PARTS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch))
        if arguments.fronts:
            write("router_fronts", FRONTS_WORKLOAD, measure_fronts(folder, arguments.fronts))
            return
        for name in names:
            rows += PARTS[name](folder)
    write("router" if len(names) == len(PARTS) else f"router-{'-'.join(names)}", WORKLOAD, rows)


if __name__ == "__main__":
    main()
