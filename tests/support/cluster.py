"""A whole cluster for integration tests, and an async client that keeps what a test may ask of it.

with running_cluster(tiny_llama_folder, num_decode=2) as harness:
    async with harness.connect() as client:
        found = await client.generate(prompt_ids=[5, 6, 7], max_tokens=8, temperature=0.0)
"""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from launcher.client import Generation
from launcher.local_pool import LocalCluster
from launcher.pool import Member
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import HandoffConfig
from pdserve.process import is_running
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2

TEST_HANDOFF = HandoffConfig(frame_tokens=64, lease_s=3.0, hold_s=5.0, call_timeout_s=3.0)
"""Short times, so that a test of their end is short as well."""
TEST_ENGINE = EngineConfig(
    model="", max_model_len=1024, max_num_seqs=32, kv_cache_memory_bytes=16 << 20
)
_CALL_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 60.0


def cluster_config(folder: Path, **changes: object) -> ClusterConfig:
    """A small float32 cluster on free loopback ports; `changes` are fields of ClusterConfig."""
    config = ClusterConfig(
        engine=replace(TEST_ENGINE, model=str(folder)),
        port=0,
        http_port=0,
        handoff=TEST_HANDOFF,
        # What a test waits for is told by heartbeats; a stream must outlive some of them.
        heartbeat_s=0.1,
        drain_timeout_s=10.0,
        ready_timeout_s=90.0,
        served_model_name="tiny",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@contextmanager
def running_cluster(
    folder: Path, *, name: str | None = None, **changes: object
) -> Iterator["ClusterHarness"]:
    """Starts a cluster and stops it at the end; a failed start shows the children's lines."""
    harness = ClusterHarness(cluster_config(folder, **changes), name)
    try:
        harness.cluster.start()
        yield harness
    except BaseException:
        print("\n".join(harness.lines[-60:]))
        raise
    finally:
        harness.cluster.stop()


class ClusterHarness:
    """A cluster together with every line that it wrote."""

    def __init__(self, config: ClusterConfig, name: str | None = None) -> None:
        self.config = config
        self.lines: list[str] = []
        self.cluster = LocalCluster(config, cluster=name, report=self.lines.append)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["HarnessClient"]:
        """Opens a client in the running event loop."""
        async with open_channel(self.cluster.address) as channel:
            yield HarnessClient(inference_pb2_grpc.InferenceStub(channel))

    def scrape(self, address: str | None = None) -> dict[str, float]:
        """Returns all samples of one /metrics (the router's by default), summed over labels."""
        url = f"http://{address or self.cluster.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=_CALL_TIMEOUT_S) as answer:
            text = answer.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def scrape_worker(self, worker_id: str) -> dict[str, float]:
        """Returns all samples of one worker's /metrics."""
        record = self.cluster.member(worker_id).record
        assert record is not None, f"{worker_id} is not registered"
        return self.scrape(record.metrics_address)

    def wait_all_registered(self, timeout_s: float = 60.0) -> None:
        """Waits until every replica is back, after a kill."""
        wait_until(lambda: all(_serves(member) for member in self.cluster.members()), timeout_s)


def _serves(member: Member) -> bool:
    # The supervisor looks now and then: until it has, it knows the record of one who is dead.
    return member.record is not None and is_running(member.record.face_pid)


class HarnessClient:
    """Calls of the Inference service; each has a deadline."""

    def __init__(self, stub: "inference_pb2_grpc.InferenceAsyncStub") -> None:
        self.stub = stub

    async def generate(
        self,
        request: inference_pb2.GenerateRequest | None = None,
        *,
        on_message: Callable[[Generation], Awaitable[None] | None] | None = None,
        timeout_s: float = _REQUEST_TIMEOUT_S,
        **fields: object,
    ) -> Generation:
        """Runs one request to its end; `fields` as of `make_request`.

        Args:
            request: instead of fields.
            on_message: called after each message with what there is so far, to act in mid-stream.
            timeout_s: deadline of the call.
        """
        call = self.start(request or make_request(**fields), timeout_s=timeout_s)
        generation = Generation()
        async for response in call:
            generation.add(response)
            if on_message is not None:
                result = on_message(generation)
                if result is not None:
                    await result
        return generation

    def start(
        self, request: inference_pb2.GenerateRequest, *, timeout_s: float = _REQUEST_TIMEOUT_S
    ) -> grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        """Begins a request and hands out its call, to be read slowly, cancelled or dropped."""
        return self.stub.Generate(request, timeout=timeout_s)

    async def loads(self) -> dict[str, inference_pb2.WorkerInfo]:
        """Asks the workers, through the router, by worker id; those that are gone are left out."""
        answer = await self.stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=_CALL_TIMEOUT_S)
        return {worker.worker_id: worker for worker in answer.workers if worker.state != "gone"}

    async def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Waits until no worker says that it runs anything; what they say is a heartbeat old."""

        async def is_idle() -> bool:
            return all(w.load.num_running == 0 for w in (await self.loads()).values())

        await wait_until_async(is_idle, timeout_s, "all workers idle")

    async def busy_worker(self, role: str, timeout_s: float = 15.0) -> str:
        """Waits until a worker of a role runs something and returns its id.

        Call `wait_idle` before the request, or a worker that is done may still look busy.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            for worker in (await self.loads()).values():
                if worker.role == role and worker.load.num_running > 0:
                    return worker.worker_id
            assert time.monotonic() < deadline_s, f"no {role} worker runs anything"


def make_request(
    *,
    prompt_ids: Sequence[int] | None = None,
    text: str | None = None,
    chat: Sequence[tuple[str, str]] | None = None,
    request_id: str = "",
    model: str = "",
    **sampling: object,
) -> inference_pb2.GenerateRequest:
    """Builds a request from exactly one prompt; `sampling` are fields of SamplingParams."""
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=types_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    assert sum(prompt is not None for prompt in (prompt_ids, text, chat)) == 1
    if prompt_ids is not None:
        request.token_ids.ids.extend(prompt_ids)
    elif text is not None:
        request.text = text
    else:
        messages = [inference_pb2.ChatMessage(role=r, content=c) for r, c in chat or ()]
        request.chat.messages.extend(messages)
    return request


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits, outside of any event loop, for a condition to come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.02)


async def wait_until_async(
    condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str
) -> None:
    """Waits for an awaited condition to come true."""
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.05)
