"""A router with one fake worker, as the benchmarks of the router run it; and what they ask it."""

import json
import shutil
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.processes import first_line, running
from benchmarks.streams import OUTPUT_TOKENS
from launcher.held_port import HeldPort
from launcher.model_source import resolve_model
from launcher.redis_server import RedisServer
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2

LONG_PROMPT_TOKENS = 131_072
PROMPT = list(range(400, 528))
STOP = "\n\nUser:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A router with its one worker."""

    pid: int
    pids: tuple[int, ...]
    """Of all its processes: with several fronts, of these and of their brain."""
    worker_pid: int
    grpc: str
    http: str
    metrics: str
    worker: str
    stalls: Path | None


@contextmanager
def serving(
    folder: Path, interval_s: float, *, is_watched: bool = False, fronts: int = 1
) -> Iterator[Site]:
    """Starts Redis, a worker and a router of so many fronts."""
    redis = RedisServer()
    redis.start()
    stalls = folder / "stalls.txt" if is_watched else None
    held = {name: HeldPort("127.0.0.1") for name in ("port", "http-port", "metrics-port")}
    ports = {name: one.number for name, one in held.items()}
    flags = [f"--{name}={port}" for name, port in ports.items()]
    flags += [f"--model={folder}", "--served-model-name=m", "--cluster=bench"]
    module = "launcher.roles.router" if fronts == 1 else "launcher.roles.router_group"
    flags += [f"--fronts={fronts}"]
    if stalls is not None:
        module, flags = "benchmarks.watched_router", [str(stalls), *flags]
    try:
        with (
            running("benchmarks.token_source", redis.url, "bench", str(interval_s)) as worker,
            running(module, *flags, PDSERVE_REDIS=redis.url) as router,
        ):
            address = first_line(worker, "listening").split()[1]
            first_line(router, "router ready")
            site = Site(
                pid=router.pid,
                pids=(router.pid,) if fronts == 1 else children_of(router.pid),
                worker_pid=worker.pid,
                grpc=f"127.0.0.1:{ports['port']}",
                http=f"127.0.0.1:{ports['http-port']}",
                metrics=f"127.0.0.1:{ports['metrics-port']}",
                worker=address,
                stalls=stalls,
            )
            _await_health(site)
            _await_fronts(site, fronts)
            yield site
    finally:
        redis.close()
        for one in held.values():
            one.close()


def _await_health(site: Site) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://{site.http}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the router did not become ready")


def _await_fronts(site: Site, fronts: int) -> None:
    deadline_s = time.monotonic() + 20
    with grpc.insecure_channel(site.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while time.monotonic() < deadline_s:
            info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
            if info.num_fronts == fronts and info.num_decode == 1:
                return
            time.sleep(0.05)
    raise RuntimeError("not all fronts became ready")


def children_of(pid: int) -> tuple[int, ...]:
    """Returns the children of a process of one thread."""
    return tuple(int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def make_folder(target: Path) -> Path:
    """Copies what a router reads of SmolLM2, with room for long prompts."""
    source = resolve_model("smollm2-135m", needs_weights=False)
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = 2 * LONG_PROMPT_TOKENS
    (target / "config.json").write_text(json.dumps(config))
    return target


def make_request(
    prompt: Sequence[int] = PROMPT, num_tokens: int = OUTPUT_TOKENS
) -> inference_pb2.GenerateRequest:
    """Builds a request whose stop string never comes."""
    return inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, temperature=0.0, stop=[STOP]
        ),
    )


@asynccontextmanager
async def client(site: Site) -> AsyncIterator["inference_pb2_grpc.InferenceAsyncStub"]:
    """Opens a client."""
    async with open_channel(site.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
