"""A router front over fake workers, and a client that checks the stream's own rules."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from prometheus_client import CollectorRegistry

from pdserve.config.router import RouterConfig
from pdserve.errors import PdserveError
from pdserve.exposition import TextExposition
from pdserve.registry.memory import MemoryRegistry
from pdserve.request import FrontId, Role
from pdserve.rpc.server import open_channel
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pdserve.timeline import MonotonicClock
from router.brain.door import Door
from router.brain.parts import Brain
from router.brain.process import Observer
from router.server import RouterFront
from tests.support.fake_network import FakeNetwork
from tests.support.fake_script import Script
from tests.support.fake_worker import FakeWorker

PROMPT = tuple(range(10, 50))
IS_FAR = "FAR_BRAIN" in os.environ
"""Set to run all tests of the router with its brain behind a socket."""


@dataclass
class Result:
    """One stream as the client saw it."""

    token_ids: list[int] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Output of each sample."""
    text: str = ""
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    completion: inference_pb2.Completion | None = None
    error: PdserveError | None = None
    request_id: str = ""

    @property
    def finish(self) -> inference_pb2.SampleFinish:
        assert self.completion is not None, self.error
        return self.completion.samples[0]


@dataclass
class Cluster:
    """What a test works on."""

    front: RouterFront
    network: FakeNetwork
    registry: MemoryRegistry
    stub: inference_pb2_grpc.InferenceStub
    port: int
    brain: Brain

    async def add(self, worker_id: str, script: Script | None = None, **over: object) -> FakeWorker:
        role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
        return await self.network.start(worker_id, role, script, **over)

    async def add_pair(self, **decode: object) -> None:
        """Starts one worker of each pool; the decode worker with these faults."""
        await self.add("p0")
        await self.add("d0", Script(**decode))
        await self.ready(2)

    def worker(self, worker_id: str) -> FakeWorker:
        """Returns the first one of that name."""
        workers = self.network.workers
        return next(workers[key] for key in workers if key.worker_id == worker_id)

    async def ready(self, num_workers: int) -> None:
        """Waits until so many workers are available."""
        await eventually(
            lambda: all(
                sum(view.is_available for view in pool.views()) == num_workers
                for pool in (self.front.pool, self.brain.pool)
            )
        )

    async def quiet(self) -> None:
        """Waits until nothing is in flight and no living worker holds anything."""
        await eventually(lambda: self.front.dispatcher.num_in_flight == 0)
        await eventually(lambda: not self.network.held(), lambda: str(self.network.held()))
        if self.front.brain is not self.brain:
            # Told over a socket.
            await eventually(lambda: self.brain.book.num_charged == 0)
        for book in {self.front.pool.book, self.brain.book}:
            fleet = book.fleet
            charged = fleet.queue.any(), fleet.blocks.any(), fleet.num_seqs.any()
            assert (book.num_charged, *charged) == (0, False, False, False)
        admission = self.front.dispatcher.admission
        assert (admission.num_in_flight, admission.num_waiting) == (0, 0)


def request_for(
    prompt: Sequence[int] = PROMPT, request_id: str = "", **sampling: object
) -> inference_pb2.GenerateRequest:
    sampling.setdefault("max_tokens", 8)
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=types_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(**sampling),
    )


async def generate(
    cluster: Cluster, request: inference_pb2.GenerateRequest | None = None, timeout_s: float = 20.0
) -> Result:
    """Runs one request and checks ONE-END: sequence without a gap, exactly one end."""
    result = Result()
    sequence = 0
    call = cluster.stub.Generate(request or request_for(), timeout=timeout_s)
    try:
        async for message in call:
            assert result.completion is None, "a message came after the completion"
            assert message.sequence == sequence
            sequence += 1
            result.request_id = message.request_id
            if message.WhichOneof("event") == "completion":
                result.completion = message.completion
            else:
                samples = result.samples.setdefault(message.chunk.index, [])
                samples += message.chunk.token_ids
                result.token_ids += message.chunk.token_ids
                result.text += message.chunk.text
                result.logprobs += message.chunk.logprobs
    except grpc.aio.AioRpcError as error:
        result.error = error_from_rpc(error)
    assert (result.completion is None) != (result.error is None)
    return result


async def eventually(
    condition: Callable[[], bool],
    describe: Callable[[], str] = lambda: "",
    timeout_s: float = 10.0,
) -> None:
    """Polls until a condition holds."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never came true: {describe()}"
        await asyncio.sleep(0.005)


async def let_others_run(num_turns: int) -> None:
    """Gives the event loop so many turns."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


@asynccontextmanager
async def run_brain(
    config: RouterConfig, registry: MemoryRegistry, path: Path
) -> AsyncIterator[Brain]:
    """Runs a brain behind a socket, in this very process."""
    series, front_id = CollectorRegistry(), FrontId("brain")
    config = replace(config, brain_socket=str(path))
    brain = Brain(config, registry, MonotonicClock(), front_id, None, series, "tiny")
    brain.pool.listen(Observer(brain))
    works = [*brain.works(), ("door", Door(brain, TextExposition(series)).run(path))]
    tasks = [asyncio.create_task(work, name=name) for name, work in works]
    try:
        yield brain
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await brain.pool.close()


@asynccontextmanager
async def run_cluster(
    folder: Path, *, is_far: bool = IS_FAR, **over: object
) -> AsyncIterator[Cluster]:
    """Runs a front without workers; tests add them.

    Args:
        folder: of the model.
        is_far: with its brain behind a socket, as several fronts have it.
        over: settings of the router.
    """
    settings: dict[str, object] = {
        "model": str(folder),
        "redis_url": "",
        "served_model_name": "tiny",
        "port": 0,
        "http_port": 0,
        "registry_poll_s": 0.02,
        "worker_silence_s": 1.5,
        "call_timeout_s": 2.0,
        "submit_timeout_s": 2.0,
        "no_worker_wait_s": 5.0,
    }
    config = RouterConfig(**{**settings, **over})
    registry = MemoryRegistry(MonotonicClock())
    network = FakeNetwork(registry)
    async with AsyncExitStack() as stack:
        brain = None
        if is_far:
            path = Path(stack.enter_context(TemporaryDirectory())) / "brain"
            brain = await stack.enter_async_context(run_brain(config, registry, path))
            config = replace(config, brain_socket=str(path))
        front = RouterFront(config, registry, MonotonicClock())
        if brain is None:
            assert isinstance(front.brain, Brain)
            brain = front.brain
        port = await front.start()
        channel = open_channel(f"127.0.0.1:{port}")
        try:
            stub = inference_pb2_grpc.InferenceStub(channel)
            yield Cluster(front, network, registry, stub, port, brain)
        finally:
            await channel.close()
            await front.stop()
            await network.stop()
