"""Two fronts and their brain as processes: kills, freezes, restarts, settings that are wrong."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from launcher.redis_server import RedisServer
from pdserve.config.worker import FaultConfig
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Role
from pdserve.rpc.server import channel_options
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.cluster import running_cluster, wait_until, wait_until_async
from tests.support.fake_network import FakeNetwork
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.router_harness import PROMPT, Result, request_for
from tests.support.text_models import make_text_model

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = 3000
"""Tokens of a stream that is aborted."""


class Group:
    """A router of two fronts, and what it has written so far."""

    def __init__(self, redis_url: str, folder: Path, *flags: str) -> None:
        self.cluster = "fronts"
        self.redis_url = redis_url
        common = ["--fronts", "2", "--model", str(folder), "--cluster", self.cluster]
        ports = ["--port", "0", "--http-port", "0", "--registry-poll-s", "0.05"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.roles.router_group", *common, *ports, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PDSERVE_REDIS": redis_url, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            self.lines += (line.rstrip() for line in pipe)

    def await_ready(self) -> None:
        wait_until(lambda: self._where() is not None or not self.reader.is_alive(), 60)
        assert self._where() is not None, "\n".join(self.lines)

    def _where(self) -> re.Match[str] | None:
        pattern = r"router ready: grpc (\S+), http \S+, metrics (\S+)"
        return next((found for one in self.lines if (found := re.match(pattern, one))), None)

    @property
    def address(self) -> str:
        found = self._where()
        assert found is not None
        return found[1]

    def figure(self, name: str) -> float | None:
        """Reads a series of the brain; None while it is away."""
        found = self._where()
        assert found is not None
        try:
            with urllib.request.urlopen(found[2], timeout=2) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        line = re.search(rf'^{name}{{engine="brain".*}} (\S+)$', text, re.MULTILINE)
        return None if line is None else float(line[1])

    async def shows(self, name: str, value: float, timeout_s: float = 30.0) -> None:
        async def is_so() -> bool:
            return await asyncio.to_thread(self.figure, name) == value

        await wait_until_async(is_so, timeout_s, f"{name} {value}")

    def pid(self, *words: str) -> int:
        """Finds a child by words of its command line."""
        for child in psutil.Process(self.process.pid).children():
            argv = " ".join(child.cmdline())
            if all(word in argv for word in words):
                return child.pid
        raise ProcessLookupError(words)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group(redis: RedisServer, text_folder: Path) -> Iterator[Group]:
    found = Group(redis.url, text_folder, "--brain-silence-s", "0.5", "--no-worker-wait-s", "30")
    found.await_ready()
    yield found
    found.process.kill()
    found.process.wait()


@asynccontextmanager
async def workers(group: Group, prefill: Script | None = None) -> AsyncIterator[FakeNetwork]:
    async with RedisRegistry(group.redis_url, group.cluster) as registry:
        network = FakeNetwork(registry)
        life = int.from_bytes(os.urandom(4), "big")
        await network.start("p0", Role.PREFILL, prefill, incarnation=life)
        script = Script(token_delay_s=0.02)
        await network.start("d0", Role.DECODE, script, incarnation=life)
        try:
            yield network
        finally:
            await network.stop()
            for worker in network.workers.values():
                await registry.deregister(worker.key.worker_id, worker.incarnation)


@asynccontextmanager
async def a_stub_of_each_front(
    group: Group,
) -> AsyncIterator[dict[str, "inference_pb2_grpc.InferenceStub"]]:
    """Connects until both fronts are met, and waits until all know two workers."""
    # Of its own: channels to one address would share a connection.
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(group.address, options=options) for _ in range(24)]
    try:
        stubs: dict[str, inference_pb2_grpc.InferenceStub] = {}
        for channel in channels:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await wait_until_async(lambda stub=stub: _sees_all(stub), 20.0, "all see all")
            info = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
            stubs.setdefault(info.front_id, stub)
            if len(stubs) == 2:
                break
        assert len(stubs) == 2
        yield stubs
    finally:
        for channel in channels:
            await channel.close()


async def _sees_all(stub: "inference_pb2_grpc.InferenceStub") -> bool:
    try:
        info = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=3)
    except grpc.aio.AioRpcError:
        return False
    return (info.num_fronts, info.num_prefill, info.num_decode) == (2, 1, 1)


async def stream(
    stub: "inference_pb2_grpc.InferenceStub",
    request_id: str,
    max_tokens: int = ENDLESS,
    prompt: Sequence[int] = PROMPT,
) -> Result:
    result = Result()
    try:
        request = request_for(prompt, request_id=request_id, max_tokens=max_tokens)
        async for message in stub.Generate(request, timeout=60):
            result.token_ids += message.chunk.token_ids
            if message.WhichOneof("event") == "completion":
                result.completion = message.completion
    except grpc.aio.AioRpcError as error:
        result.error = error
    return result


def check_tokens(result: Result) -> None:
    assert result.token_ids == expected_tokens(PROMPT, len(result.token_ids))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
async def test_a_dead_front_gives_its_load_back_and_leaves_the_other_s_streams(
    group: Group, number: signal.Signals
) -> None:
    async with workers(group), a_stub_of_each_front(group) as stubs:
        streams = {
            name: asyncio.create_task(stream(stub, f"of-{name}")) for name, stub in stubs.items()
        }
        await group.shows("pdserve_router_charged", 2)
        # A frozen one is killed by whoever watches it.
        os.kill(group.pid("launcher.roles.router", "--front-number 0"), number)
        await group.shows("pdserve_router_charged", 1)
        await asyncio.wait(streams.values(), return_when=asyncio.FIRST_COMPLETED)
        (dead,) = [name for name, task in streams.items() if task.done()]
        (left,) = [name for name in streams if name != dead]
        assert streams[dead].result().error.code() is grpc.StatusCode.UNAVAILABLE
        # The dead front's is started again, and takes clients.
        await group.shows("pdserve_router_fronts", 2)
        await wait_until_async(lambda: _sees_all(stubs[dead]), 20.0, "the front is back")
        check_tokens(await stream(stubs[dead], "anew", 8))
        assert not streams[left].done()
        await stubs[left].Abort(inference_pb2.AbortRequest(request_id=f"of-{left}"))
        result = await streams[left]
        check_tokens(result)
        assert len(result.token_ids) > 8
        await group.shows("pdserve_router_charged", 0)


async def test_A6_a_client_that_goes_away_while_it_waits_frees_its_place_in_the_brain(
    group: Group,
) -> None:
    # Two steps of prompts are sent ahead, and none is done for long.
    slow = Script(hold_first_token_s=60.0)
    async with workers(group, slow), a_stub_of_each_front(group) as stubs:
        one, other = stubs.values()
        busy = [
            asyncio.create_task(stream(one, f"busy{number}", 8, [100 + number] * 4000))
            for number in range(5)
        ]
        await group.shows("pdserve_router_charged", 5)
        waiting = [
            asyncio.create_task(stream(stub, f"waits{number}", 8))
            for number, stub in enumerate((one, other))
        ]
        await group.shows("pdserve_router_turns_waiting", 2)
        waiting[0].cancel()
        await group.shows("pdserve_router_turns_waiting", 1)
        assert group.figure("pdserve_router_charged") == 5
        for task in (*busy, *waiting):
            task.cancel()
        await asyncio.wait((*busy, *waiting))
        await group.shows("pdserve_router_charged", 0)
        await group.shows("pdserve_router_turns_waiting", 0)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
async def test_streams_outlive_their_brain_and_new_requests_wait_for_the_next(
    group: Group, number: signal.Signals
) -> None:
    async with workers(group), a_stub_of_each_front(group) as stubs:
        streams = {
            name: asyncio.create_task(stream(stub, f"of-{name}")) for name, stub in stubs.items()
        }
        await group.shows("pdserve_router_charged", 2)
        before = group.pid("launcher.roles.brain")
        # A frozen one is killed by whoever watches it.
        os.kill(before, number)
        waiting = [
            asyncio.create_task(stream(stub, f"new{place}", 8))
            for place, stub in enumerate(stubs.values())
        ]
        for task in waiting:
            result = await task
            assert result.error is None
            assert result.token_ids == expected_tokens(PROMPT, 8)
        assert group.pid("launcher.roles.brain") != before
        # What is in flight was told to it.
        await group.shows("pdserve_router_charged", 2)
        for name, stub in stubs.items():
            assert not streams[name].done()
            await stub.Abort(inference_pb2.AbortRequest(request_id=f"of-{name}"))
            check_tokens(await streams[name])
        await group.shows("pdserve_router_charged", 0)


async def test_C19_a_group_that_was_paused_as_a_whole_blames_none_of_its_children(
    group: Group,
) -> None:
    async with workers(group), a_stub_of_each_front(group) as stubs:
        roles = (("launcher.roles.brain",), ("--front-number 0",), ("--front-number 1",))
        pids = [group.process.pid, *(group.pid(*words) for words in roles)]
        num_lines = len(group.lines)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        # Longer than a child may be silent.
        await asyncio.sleep(4.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await group.shows("pdserve_router_fronts", 2)
        for place, stub in enumerate(stubs.values()):
            check_tokens(await stream(stub, f"later{place}", 8))
        assert pids[1:] == [group.pid(*words) for words in roles]
        assert not [line for line in group.lines[num_lines:] if "killing" in line]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        pytest.param(
            ("--profile", "/nothing/here.json"), "/nothing/here.json", marks=pytest.mark.soak
        ),
        (("--http-port", "{taken}"), "is already in use"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(
    redis: RedisServer, text_folder: Path, group: Group, flags: tuple[str, str], text: str
) -> None:
    taken = group.address.rpartition(":")[2]
    found = Group(redis.url, text_folder, *(flag.format(taken=taken) for flag in flags))
    assert found.process.wait(60) == 2
    found.reader.join(30)
    errors = [line for line in found.lines if "error: " in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert text in errors[0]


def test_C15_a_cluster_with_two_fronts_finishes_its_streams_when_it_is_stopped(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    faults = FaultConfig(step_delay_s=0.02)
    # One pool is started sooner, and what is tested is the router.
    settings = {"fronts": 2, "num_prefill": 0, "decode_faults": faults}
    with running_cluster(tiny_llama_folder, **settings) as harness:

        async def use() -> None:
            async with harness.connect() as client:
                info = await client.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
                assert (info.num_fronts, info.requests_arrived) == (2, 0)
                stopping: list[asyncio.Task[None]] = []

                def stop(_: object) -> None:
                    if not stopping:
                        work = asyncio.to_thread(harness.cluster.stop)
                        stopping.append(asyncio.create_task(work))

                request = {"prompt_ids": [5, 6, 7], "ignore_eos": True, "temperature": 0.0}
                found = await client.generate(**request, max_tokens=40, on_message=stop)
                assert len(found.token_ids) == 40
                assert found.finish is not None
                await stopping[0]

        asyncio.run(use())
