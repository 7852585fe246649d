"""Streams that end early or are read badly: cancels, resets, deadlines, pings, slow readers."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launcher.client import Generation
from pdserve.config.worker import FaultConfig
from pdserve.rpc.server import KEEPALIVE_TIME_MS, channel_options
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.cluster import (
    ClusterHarness,
    HarnessClient,
    make_request,
    running_cluster,
    wait_until_async,
)
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger
from tests.support.statuses import Failure, fail, try_request
from tests.support.tcp_proxy import running_proxy

PROMPT = tuple(range(10, 110))
NUM_WORKERS = 2
CLIENT_BUFFER_BYTES = 64 * 1024
PINGED_FOR_S = 3.2 * KEEPALIVE_TIME_MS / 1000
"""A default server cuts a client at its third ping too many."""
Status = grpc.StatusCode


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    # Slow commits widen the gap between the legs; slow steps give time to act in.
    with running_cluster(
        tiny_llama_folder,
        max_client_buffer_bytes=CLIENT_BUFFER_BYTES,
        prefill_faults=FaultConfig(step_delay_s=0.004, commit_delay_s=0.02),
        decode_faults=FaultConfig(step_delay_s=0.002),
    ) as harness:
        yield harness


class SilentStream:
    """A stream without data, opened on a thread of its own before the other tests run."""

    def __init__(self, address: str) -> None:
        self.opened_at_s = time.monotonic()
        self._channel = grpc.insecure_channel(address, options=channel_options())
        watch = health_pb2.HealthCheckRequest(service="no such service")
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(watch)
        self.first = next(self._call)
        self.failure: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            self.failure = error

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._call.cancel()
        self._thread.join()
        self._channel.close()


@pytest.fixture(scope="module")
def silent_streams(cluster: ClusterHarness) -> Iterator[list[SilentStream]]:
    """One to the router and one to each worker."""
    records = [member.record for member in cluster.cluster.members()]
    addresses = [cluster.cluster.address, *(record.address for record in records if record)]
    streams = [SilentStream(address) for address in addresses]
    yield streams
    for stream in streams:
        stream.close()


@pytest.fixture(autouse=True)
def open_silent_streams(silent_streams: list[SilentStream]) -> None:
    """Opens them before the first test."""


async def in_flight(client: HarnessClient) -> int:
    info = await client.stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=10)
    return info.requests_in_flight


async def wait_none_in_flight(client: HarnessClient, timeout_s: float = 5.0) -> None:
    async def is_none() -> bool:
        return await in_flight(client) == 0

    await wait_until_async(is_none, timeout_s, "no request in flight")


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[HarnessClient]:
    """A client with a connection of its own."""
    # A small window, or the transport itself would hold what the client does not read.
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4096),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield HarnessClient(inference_pb2_grpc.InferenceStub(channel))


@pytest.mark.parametrize("delay_ms", [0, 4, 8, 12, 16, 20, 25, 30, 40, 60])
async def test_A3_a_cancel_between_the_legs_is_released_on_both_sides(
    cluster: ClusterHarness, delay_ms: int
) -> None:
    async with cluster.connect() as client:
        calls = [
            client.start(make_request(prompt_ids=[n, *PROMPT], max_tokens=400, ignore_eos=True))
            for n in range(3, 7)
        ]
        await asyncio.sleep(delay_ms / 1000)
        for call in calls:
            call.cancel()
        await wait_none_in_flight(client)
        await assert_ledger(client, NUM_WORKERS)


async def test_A3_a_cancel_at_the_first_token_finds_decode_before_its_commit(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        for number in range(10):
            ids = [200 + number, *PROMPT]
            call = client.start(make_request(prompt_ids=ids, max_tokens=400, ignore_eos=True))
            first = await call.read()
            assert isinstance(first, inference_pb2.GenerateResponse)
            assert len(first.chunk.token_ids) == 1
            call.cancel()
        await wait_none_in_flight(client)
        await assert_ledger(client, NUM_WORKERS)
        await canary.assert_alive(client)


async def test_abort_ends_its_own_request_alone_as_cancelled(cluster: ClusterHarness) -> None:
    async with cluster.connect() as client:
        fields = {"prompt_ids": PROMPT, "max_tokens": 300, "ignore_eos": True}
        aborted = asyncio.create_task(fail(client, request_id="mine", **fields))
        other = asyncio.create_task(client.generate(request_id="other", **fields))
        await wait_until_async(lambda: _counts(client, 2), 20.0, "both in flight")
        await client.stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=5)
        failure = await aborted
        assert (failure.code, failure.reason) == (Status.CANCELLED, "CANCELLED")
        assert len((await other).token_ids) == 300
        # Ended and unknown ids are no error; an empty one is.
        await client.stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Abort(inference_pb2.AbortRequest(), timeout=5)
        assert caught.value.code() is Status.INVALID_ARGUMENT
        await assert_ledger(client, NUM_WORKERS)


async def _counts(client: HarnessClient, count: int) -> bool:
    return await in_flight(client) == count


# Its 900 tokens take 1.8 s at the least, and the first of them is there long before that.
@pytest.mark.parametrize(("timeout_s", "has_tokens"), [(0.004, False), (1.5, True)])
async def test_a_deadline_ends_a_request_before_and_after_its_first_token(
    cluster: ClusterHarness, timeout_s: float, has_tokens: bool
) -> None:
    async with cluster.connect() as client:
        await wait_none_in_flight(client)
        failure = await fail(
            client,
            prompt_ids=PROMPT,
            max_tokens=900,
            ignore_eos=True,
            request_id=f"deadline-{has_tokens}",
            timeout_s=timeout_s,
        )
        assert failure.code is Status.DEADLINE_EXCEEDED
        assert (failure.num_messages > 0) == has_tokens
        await wait_none_in_flight(client)
        await assert_ledger(client, NUM_WORKERS)


async def test_D14_100_cancels_half_of_them_by_reset_leave_nothing_behind(
    cluster: ClusterHarness,
) -> None:
    numbers = random.Random(14)
    router = psutil.Process(cluster.cluster.router_pid)
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        num_fds, num_threads = router.num_fds(), router.num_threads()

        async def cancel_once(number: int) -> None:
            ids = [number, *PROMPT[: numbers.randrange(1, 100)]]
            request = make_request(prompt_ids=ids, max_tokens=400, ignore_eos=True)
            num_messages, delay_s = numbers.randrange(0, 6), numbers.uniform(0, 0.05)
            proxied = running_proxy(cluster.cluster.address)
            async with proxied as proxy, client_of(proxy.address) as one:
                call = one.start(request)
                for _ in range(num_messages):
                    await call.read()
                await proxy.connected.wait()
                await asyncio.sleep(delay_s)
                if number % 2:
                    proxy.reset()
                    # Whatever it had received may still be read.
                    assert await call.code() is Status.UNAVAILABLE
                else:
                    call.cancel()

        for start in range(0, 100, 20):
            await asyncio.gather(*(cancel_once(3 + start + n) for n in range(20)))
        await wait_none_in_flight(client)
        await assert_ledger(client, NUM_WORKERS)

        async def is_at_rest() -> bool:
            return router.num_fds() <= num_fds + 4 and router.num_threads() <= num_threads + 4

        await wait_until_async(is_at_rest, 15.0, "descriptors and threads of the router are back")
        await canary.assert_alive(client)


async def test_D11_clients_that_read_1_byte_per_s_are_cut_alone(cluster: ClusterHarness) -> None:
    # About 330 bytes a token in the router: more than its buffer and the sockets hold together.
    long = {"prompt_ids": [5, 6, 7], "max_tokens": 1000, "logprobs": 20, "ignore_eos": True}
    short = long | {"max_tokens": 200}
    async with cluster.connect() as client, AsyncExitStack() as stack:
        canary = await Canary.hatch(cluster, client)
        before = cluster.scrape()["pdserve_router_slow_readers_total"]
        slow = []
        proxies = []
        for _ in range(10):
            proxy = await stack.enter_async_context(
                running_proxy(cluster.cluster.address, is_slow=True)
            )
            proxies.append(proxy)
            one = await stack.enter_async_context(client_of(proxy.address))
            slow.append(asyncio.create_task(try_request(one, timeout_s=60, **long)))
        reading = [asyncio.create_task(try_request(client, timeout_s=60, **short)) for _ in "ab"]

        async def are_cut() -> bool:
            scraped = await asyncio.to_thread(cluster.scrape)
            return scraped["pdserve_router_slow_readers_total"] - before == 10

        await wait_until_async(are_cut, 50.0, "all slow readers are cut")
        for proxy in proxies:
            proxy.speed_up()
        for found in await asyncio.gather(*slow):
            assert isinstance(found, Failure)
            assert (found.code, found.reason) == (Status.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert found.retry_after_s is not None
            assert found.retry_after_s > 0
        for ended in await asyncio.gather(*reading):
            assert isinstance(ended, Generation), ended
            assert len(ended.token_ids) == 200
        await wait_none_in_flight(client)
        await assert_ledger(client, NUM_WORKERS)
        await canary.assert_alive(client)


@pytest.mark.soak
async def test_D13_pings_on_silent_streams_cut_nothing(
    silent_streams: list[SilentStream],
) -> None:
    pinged_s = time.monotonic() - max(stream.opened_at_s for stream in silent_streams)
    await asyncio.sleep(max(PINGED_FOR_S - pinged_s, 0))
    for stream in silent_streams:
        assert stream.failure is None
        assert stream.is_open
