"""What several router fronts with one brain make of a machine, against a single front.

Clients connect until each front has as many connections as every other, as many clients would; one
connection is one front's for its whole life.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import uvloop

from benchmarks.processes import cpu_s, percentile
from benchmarks.report import Row
from benchmarks.router_site import PROMPT, Site, make_request, serving
from benchmarks.streams import NUM_STREAMS, OUTPUT_TOKENS, read_stream
from pdserve.rpc.server import channel_options
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

NUM_CONNECTIONS = 16
NUM_RUNS = 5
NUM_SHORT = 600
NUM_SINGLE = 200
FRONTS_WORKLOAD = (
    f"{NUM_STREAMS} streams of {OUTPUT_TOKENS} tokens over {NUM_CONNECTIONS} connections, equally "
    f"many a front, prompts of {len(PROMPT)} ids; one fake decode worker at full speed; fronts, "
    f"brain, worker and client share all cores; medians of {NUM_RUNS} runs. Short: {NUM_SHORT} "
    f"requests of one token, {NUM_STREAMS} at a time. Single: {NUM_SINGLE} of them one by one"
)

Stub = "inference_pb2_grpc.InferenceAsyncStub"


@asynccontextmanager
async def connected(site: Site, fronts: int) -> AsyncIterator[list[Stub]]:
    """Opens as many connections to each front."""
    share = NUM_CONNECTIONS // fronts
    found: dict[str, list[Stub]] = {}
    channels: list[grpc.aio.Channel] = []
    # Of its own: channels to one address would share a connection.
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    try:
        while len(found) < fronts or any(len(stubs) < share for stubs in found.values()):
            channel = grpc.aio.insecure_channel(site.grpc, options=options)
            stub = inference_pb2_grpc.InferenceStub(channel)
            info = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
            stubs = found.setdefault(info.front_id, [])
            if len(stubs) < share:
                stubs.append(stub)
                channels.append(channel)
            else:
                await channel.close()
        yield [stub for stubs in zip(*found.values(), strict=True) for stub in stubs]
    finally:
        for channel in channels:
            await channel.close()


async def run_long(stubs: Sequence[Stub]) -> int:
    """Runs all streams; returns tokens."""
    calls = [stubs[number % len(stubs)].Generate(make_request()) for number in range(NUM_STREAMS)]
    return sum(tokens for tokens, _ in await asyncio.gather(*map(read_stream, calls)))


async def run_short(stubs: Sequence[Stub]) -> int:
    """Runs short requests, so many at a time; returns how many."""
    numbers = iter(range(NUM_SHORT))

    async def work(stub: Stub) -> None:
        for _ in numbers:
            await read_stream(stub.Generate(make_request(num_tokens=1)))

    await asyncio.gather(*(work(stubs[number % len(stubs)]) for number in range(NUM_STREAMS)))
    return NUM_SHORT


async def run_single(stubs: Sequence[Stub]) -> list[float]:
    """Runs short requests one by one; returns seconds to their first token."""
    times_s = []
    for number in range(NUM_SINGLE):
        before_s = time.monotonic()
        call = stubs[number % len(stubs)].Generate(make_request(num_tokens=1))
        await call.read()
        times_s.append(time.monotonic() - before_s)
        while await call.read() is not grpc.aio.EOF:
            pass
    return times_s[10:]


async def measure(site: Site, fronts: int) -> dict[str, list[float]]:
    """Measures one router, after a run that warms it up."""
    found: dict[str, list[float]] = {}
    async with connected(site, fronts) as stubs:
        await run_long(stubs)
        for load, name in ((run_long, "tokens"), (run_short, "requests")):
            for _ in range(NUM_RUNS):
                before_cpu_s, before_s = sum(map(cpu_s, site.pids)), time.monotonic()
                count = await load(stubs)
                wall_s = time.monotonic() - before_s
                used_s = sum(map(cpu_s, site.pids)) - before_cpu_s
                found.setdefault(f"{name}_per_s", []).append(count / wall_s)
                found.setdefault(f"router_us_per_{name[:-1]}", []).append(1e6 * used_s / count)
                found.setdefault(f"router_cores_{name}", []).append(used_s / wall_s)
        times_s = await run_single(stubs)
    found["ttft_ms"] = [1e3 * percentile(times_s, share) for share in (0.5, 0.99)]
    return found


def measure_fronts(folder: Path, counts: Sequence[int]) -> list[Row]:
    """Measures routers of so many fronts, one after another."""
    rows = []
    for fronts in counts:
        with serving(folder, 0.0, fronts=fronts) as site:
            found = uvloop.run(measure(site, fronts))
        details: dict[str, object] = {
            key: [round(one, 3) for one in values] for key, values in found.items()
        }
        name = f"{fronts} front" if fronts == 1 else f"{fronts} fronts, one brain"
        for text, key, unit in (
            ("tokens per second", "tokens_per_s", "tokens/s"),
            ("router CPU per token, all processes", "router_us_per_token", "us"),
            ("short requests per second", "requests_per_s", "requests/s"),
            ("router CPU per short request, all processes", "router_us_per_request", "us"),
        ):
            value = statistics.median(found[key])
            better = "higher" if unit.endswith("/s") else "lower"
            row = Row(name=f"{name}: {text}", value=value, unit=unit, details=details)
            row.better = "higher" if better == "higher" else "lower"
            rows.append(row)
            details = {}
        p50_ms, p99_ms = found["ttft_ms"]
        rows.append(
            Row(
                name=f"{name}: single request, first token p50",
                value=p50_ms,
                unit="ms",
                details={"p99_ms": round(p99_ms, 3)},
            )
        )
    return rows
