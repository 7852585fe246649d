"""What several router fronts with one brain make of a machine, against a single front.

Clients connect until each front has as many connections as every other, as many clients would; one
connection is one front's for its whole life.
"""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
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
    f"brain, worker and client share all cores; medians of {NUM_RUNS} runs, both routers turn by "
    f"turn. CPU is that of all router processes. Short requests: {NUM_SHORT} "
    f"of one token, {NUM_STREAMS} at a time. Single: {NUM_SINGLE} of them one by one"
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


@dataclass(slots=True)
class Router:
    """One of those compared."""

    fronts: int
    site: Site
    stubs: list[Stub]
    found: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def name(self) -> str:
        return "1 front" if self.fronts == 1 else f"{self.fronts} fronts, one brain"

    async def measure(self, load: Callable[[Sequence[Stub]], Awaitable[int]], unit: str) -> None:
        """Runs a load once."""
        before_cpu_s, before_s = sum(map(cpu_s, self.site.pids)), time.monotonic()
        count = await load(self.stubs)
        wall_s = time.monotonic() - before_s
        used_s = sum(map(cpu_s, self.site.pids)) - before_cpu_s
        self.found[f"{unit}s_per_s"].append(count / wall_s)
        self.found[f"router_us_per_{unit}"].append(1e6 * used_s / count)
        self.found[f"router_cores_{unit}s"].append(used_s / wall_s)


async def compare(sites: Mapping[int, Site]) -> list[Router]:
    """Measures all routers turn by turn, so that what else the machine does hits all of them."""
    async with AsyncExitStack() as stack:
        routers = [
            Router(fronts, site, await stack.enter_async_context(connected(site, fronts)))
            for fronts, site in sites.items()
        ]
        for router in routers:
            await run_long(router.stubs)
        for load, unit in ((run_long, "token"), (run_short, "request")):
            for _ in range(NUM_RUNS):
                for router in routers:
                    await router.measure(load, unit)
        for router in routers:
            times_s = await run_single(router.stubs)
            router.found["ttft_ms"] = [1e3 * percentile(times_s, share) for share in (0.5, 0.99)]
    return routers


def measure_fronts(folder: Path, counts: Sequence[int]) -> list[Row]:
    """Measures routers of so many fronts; those behind the first are compared with it."""
    with ExitStack() as stack:
        sites = {n: stack.enter_context(serving(folder, 0.0, fronts=n)) for n in counts}
        routers = uvloop.run(compare(sites))
    rows = [row for router in routers for row in _rows_of(router)]
    first = routers[0]
    for router in routers[1:]:
        for unit in ("tokens_per_s", "requests_per_s"):
            pairs = zip(router.found[unit], first.found[unit], strict=True)
            ratios = [value / other for value, other in pairs]
            rows.append(
                Row(
                    name=f"{router.name} / {first.name}: {unit}",
                    value=statistics.median(ratios),
                    unit="x",
                    better="higher",
                    details={"pairs": [round(ratio, 3) for ratio in ratios]},
                )
            )
    return rows


def _rows_of(router: Router) -> list[Row]:
    rows = []
    for key, unit in (
        ("tokens_per_s", "tokens/s"),
        ("router_us_per_token", "us"),
        ("requests_per_s", "requests/s"),
        ("router_us_per_request", "us"),
    ):
        row = Row(
            name=f"{router.name}: {key}",
            value=statistics.median(router.found[key]),
            unit=unit,
            better="higher" if unit.endswith("/s") else "lower",
            details={"runs": [round(one, 1) for one in router.found[key]]},
        )
        rows.append(row)
    p50_ms, p99_ms = router.found["ttft_ms"]
    details: dict[str, object] = {
        "p99_ms": round(p99_ms, 3),
        "router_cores_tokens": [round(one, 2) for one in router.found["router_cores_tokens"]],
        "router_cores_requests": [round(one, 2) for one in router.found["router_cores_requests"]],
    }
    name = f"{router.name}: single request, first token p50"
    return [*rows, Row(name=name, value=p50_ms, unit="ms", details=details)]
