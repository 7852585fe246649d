"""A front whose brain is behind a socket: while it is there, away, ahead and behind."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest
from rich.console import Console

from launcher.commands.status import show, to_dict
from pdserve.config.router import RouterConfig
from pdserve.errors import NoBrain, Overloaded, RequestNotFound
from pdserve.registry.base import WorkerRecord
from pdserve.registry.memory import MemoryRegistry
from pdserve.request import Role
from pdserve.rpc.server import open_channel
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from pdserve.timeline import MonotonicClock
from router.server import RouterFront
from tests.support.cluster import wait_until_async
from tests.support.fake_network import FakeNetwork
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.router_harness import (
    PROMPT,
    Cluster,
    eventually,
    generate,
    request_for,
    run_brain,
    run_cluster,
)


class ShortSighted(MemoryRegistry):
    """Shows another registry's workers, but for some."""

    def __init__(self, other: MemoryRegistry) -> None:
        super().__init__(MonotonicClock())
        self._other = other
        self.hidden: set[str] = set()

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        found = await self._other.list_workers()
        return tuple(record for record in found if record.worker_id not in self.hidden)


@dataclass
class Pair:
    """Fronts of one brain, or of none as long as `brain` is not entered."""

    config: RouterConfig
    network: FakeNetwork
    registry: MemoryRegistry
    near: ShortSighted
    """What the fronts see."""
    fronts: list[RouterFront]
    stubs: list["inference_pb2_grpc.InferenceStub"]

    def cluster(self, number: int = 0) -> Cluster:
        front = self.fronts[number]
        return Cluster(front, self.network, self.registry, self.stubs[number], 0, None)

    def brain(self):
        assert self.config.brain_socket is not None
        return run_brain(self.config, self.registry, Path(self.config.brain_socket))

    async def up(self, num_workers: int) -> None:
        await eventually(lambda: all(front.brain.is_up for front in self.fronts))
        await eventually(
            lambda: all(
                sum(view.is_available for view in front.pool.views()) == num_workers
                for front in self.fronts
            )
        )


@asynccontextmanager
async def run_pair(folder: Path, path: Path, **over: object) -> AsyncIterator[Pair]:
    settings: dict[str, object] = {
        "model": str(folder),
        "redis_url": "",
        "served_model_name": "tiny",
        "port": 0,
        "http_port": 0,
        "registry_poll_s": 0.02,
        "no_worker_wait_s": 5.0,
        "brain_silence_s": 0.6,
        "brain_socket": str(path / "brain"),
    }
    config = RouterConfig(**{**settings, **over})
    registry = MemoryRegistry(MonotonicClock())
    near, network = ShortSighted(registry), FakeNetwork(registry)
    async with AsyncExitStack() as stack:
        fronts = [
            RouterFront(replace(config, front_number=number), near, MonotonicClock())
            for number in range(2)
        ]
        stubs = []
        for front in fronts:
            port = await front.start()
            stack.push_async_callback(front.stop)
            channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
            stubs.append(inference_pb2_grpc.InferenceStub(channel))
        yield Pair(config, network, registry, near, fronts, stubs)
        await network.stop()


async def test_a_request_is_served_and_leaves_nothing_in_either_book(text_folder: Path) -> None:
    async with run_cluster(text_folder, is_far=True) as cluster:
        await cluster.add("p0")
        await cluster.add("d0")
        await cluster.ready(2)
        result = await generate(cluster)
        assert result.token_ids == expected_tokens(PROMPT, 8)
        await cluster.quiet()


async def test_many_requests_and_a_worker_that_dies_leave_nothing_in_either_book(
    text_folder: Path,
) -> None:
    async with run_cluster(text_folder, is_far=True) as cluster:
        for name in ("p0", "p1", "d0"):
            await cluster.add(name)
        await cluster.add("d1", Script(die_before=3))
        await cluster.ready(4)
        results = await asyncio.gather(
            *(generate(cluster, request_for([60 + n] * 40)) for n in range(40))
        )
        for number, result in enumerate(results):
            assert result.token_ids == expected_tokens([60 + number] * 40, 8)
        await cluster.quiet()


async def test_without_a_brain_a_request_waits_and_is_then_told_when_to_come_again(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path, no_worker_wait_s=0.3) as pair:
        began_s = asyncio.get_running_loop().time()
        result = await generate(pair.cluster())
        assert asyncio.get_running_loop().time() - began_s >= 0.3
        assert isinstance(result.error, NoBrain)
        assert result.error.grpc_code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert result.error.retry_after_s > 0
        base = f"http://127.0.0.1:{pair.fronts[0].http_port}"
        async with httpx.AsyncClient(base_url=base) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            health = await client.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_brain")
        assert "retry-after" in answer.headers
        assert health.status_code == 503


async def test_a_request_that_waits_is_served_by_the_brain_that_comes(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path) as pair:
        await pair.network.start("p0", Role.PREFILL)
        await pair.network.start("d0", Role.DECODE)
        waiting = asyncio.create_task(generate(pair.cluster()))
        await eventually(lambda: pair.fronts[0].dispatcher.num_in_flight == 1)
        async with pair.brain():
            assert (await waiting).token_ids == expected_tokens(PROMPT, 8)


async def test_streams_go_on_without_the_brain_and_are_told_to_the_next_one(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path) as pair:
        await pair.network.start("p0", Role.PREFILL)
        # Until the next brain is there and has heard of them, they do not end.
        script = Script(token_delay_s=0.2)
        await pair.network.start("d0", Role.DECODE, script)
        async with pair.brain():
            await pair.up(2)
            streams = [
                asyncio.create_task(generate(pair.cluster(number), request_for(max_tokens=60)))
                for number in range(2)
            ]
            await eventually(lambda: pair.network.workers and len(pair.network.held()) == 1)
        await eventually(lambda: not any(front.brain.is_up for front in pair.fronts))
        async with pair.brain() as again:
            await eventually(lambda: again.book.num_charged == 2)
            row = again.book.fleet.row_of_id
            await eventually(lambda: row("d0") is not None)
            assert again.book.fleet.num_seqs[row("d0")] == 2
            script.token_delay_s = 0.0
            for stream in streams:
                assert (await stream).token_ids == expected_tokens(PROMPT, 60)
            await eventually(lambda: again.book.num_charged == 0)
            assert not again.book.fleet.num_seqs.any()


async def test_a_worker_that_the_front_does_not_know_yet_is_avoided(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path) as pair:
        pair.near.hidden.add("d0")
        await pair.network.start("p0", Role.PREFILL)
        await pair.network.start("d0", Role.DECODE)
        await pair.network.start("d1", Role.DECODE)
        async with pair.brain() as brain:
            await pair.up(2)
            await eventually(lambda: sum(v.is_available for v in brain.pool.views()) == 3)
            for number in range(4):
                result = await generate(pair.cluster(), request_for([70 + number] * 40))
                assert result.completion is not None
                assert result.completion.timeline.decode_worker == "d1"
            await eventually(lambda: brain.book.num_charged == 0)


async def test_any_front_explains_aborts_and_counts_what_another_has(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path) as pair:
        await pair.network.start("p0", Role.PREFILL)
        await pair.network.start("d0", Role.DECODE, Script(token_delay_s=0.02))
        async with pair.brain():
            await pair.up(2)
            request = request_for(request_id="mine", max_tokens=2000)
            stream = asyncio.create_task(generate(pair.cluster(0), request))
            await eventually(lambda: bool(pair.network.held()))
            other = pair.stubs[1]
            found = await other.Explain(inference_pb2.ExplainRequest(request_id="mine"))
            assert (found.request_id, found.state) == ("mine", "running")
            assert found.placements[0].candidates[0].decode_worker == "d0"
            info = await other.GetServerInfo(inference_pb2.GetServerInfoRequest())
            assert (info.num_fronts, info.requests_in_flight, info.requests_arrived) == (2, 1, 1)
            assert (info.num_prefill, info.num_decode) == (1, 1)
            assert [one.name for one in info.processes] == ["front-0", "front-1", "brain"]
            assert [one.requests_in_flight for one in info.processes] == [1, 0, 0]
            await other.Abort(inference_pb2.AbortRequest(request_id="mine"))
            assert (await stream).error is not None
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await other.Explain(inference_pb2.ExplainRequest(request_id="nobody's"))
            assert isinstance(error_from_rpc(caught.value), RequestNotFound)


async def test_status_without_the_brain_says_so_and_what_is_not_known(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path) as pair:
        await pair.network.start("d0", Role.DECODE)
        asked = inference_pb2.GetServerInfoRequest(accepts_partial=True)
        never = await pair.stubs[1].GetServerInfo(asked)
        assert [(one.name, one.state) for one in never.processes] == [
            ("front-1", "waiting"),
            ("brain", "away"),
        ]
        assert not never.processes[1].HasField("unheard_s")
        async with pair.brain():
            await pair.up(1)
            assert not (await pair.stubs[1].GetServerInfo(asked)).is_partial
        await eventually(lambda: not any(front.brain.is_up for front in pair.fronts))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.stubs[1].GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert isinstance(error_from_rpc(caught.value), NoBrain)

        info = await pair.stubs[1].GetServerInfo(asked)
        model = await pair.stubs[1].GetModelInfo(inference_pb2.GetModelInfoRequest())
        loads = await pair.stubs[1].GetLoads(inference_pb2.GetLoadsRequest())
    console = Console(width=160)
    with console.capture() as capture:
        show("a:1", info, model, loads, console)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    assert "the brain is away: new requests wait for it. Requests are those of front-1" in text
    for row in (
        r"front-0 +unknown for \d+ s +\d+",
        r"front-1 +(waiting|serving) +\d+ +\d+ s +0 +0",
        r"brain +away for \d+ s",
        r"d0 +decode +ready +.*",
    ):
        assert re.search(f"^ *{row}$", text, re.MULTILINE), text
    shown = to_dict("a:1", info, model, loads)
    assert shown["is_partial"]
    routers = shown["router"]
    assert isinstance(routers, list)
    assert [one["unheard_s"] is None for one in routers] == [False, True, False]


async def test_a_scrape_of_any_front_shows_all_and_their_brain(
    text_folder: Path, tmp_path: Path
) -> None:
    async with run_pair(text_folder, tmp_path) as pair, pair.brain():
        await pair.up(0)
        base = f"http://127.0.0.1:{pair.fronts[1].http_port}"
        async with httpx.AsyncClient(base_url=base) as client:
            text = (await client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        assert len(lines) == 2
        assert text.count("# TYPE vllm:num_requests_running gauge") == 1
        assert 'pdserve_index_pairs{engine="brain",model_name="tiny",role="router"} 0.0' in text


async def test_health_follows_the_brain(text_folder: Path, tmp_path: Path) -> None:
    async with run_pair(text_folder, tmp_path, pools_may_be_empty=True) as pair:
        base = f"http://127.0.0.1:{pair.fronts[0].http_port}"
        async with httpx.AsyncClient(base_url=base) as client:

            async def becomes(status: int) -> None:
                async def is_so() -> bool:
                    return (await client.get("/health")).status_code == status

                await wait_until_async(is_so, 5.0, f"status {status}")

            await becomes(503)
            async with pair.brain():
                await becomes(200)
            await becomes(503)


async def test_a_full_front_refuses_at_once_with_a_hint(text_folder: Path, tmp_path: Path) -> None:
    async with run_pair(text_folder, tmp_path, max_queued=1) as pair:
        first = asyncio.create_task(generate(pair.cluster()))
        await eventually(lambda: pair.fronts[0].dispatcher.num_in_flight == 1)
        result = await generate(pair.cluster())
        assert isinstance(result.error, Overloaded)
        assert result.error.retry_after_s > 0
        first.cancel()
        await asyncio.wait((first,))


@pytest.mark.parametrize("limit", ["max_in_flight", "max_queued"])
async def test_A7_the_limits_are_of_all_fronts_together(
    text_folder: Path, tmp_path: Path, limit: str
) -> None:
    async with run_pair(text_folder, tmp_path, **{limit: 2}) as pair, pair.brain():
        if limit == "max_in_flight":
            await pair.network.start("p0", Role.PREFILL)
            await pair.network.start("d0", Role.DECODE, Script(token_delay_s=0.02))
            await pair.up(2)
        else:
            # Nobody can take them: they wait.
            await pair.up(0)
        streams = [
            asyncio.create_task(
                generate(
                    pair.cluster(number), request_for(request_id=f"r{number}", max_tokens=2000)
                )
            )
            for number in (0, 1)
        ]
        admissions = [front.dispatcher.admission for front in pair.fronts]
        await eventually(lambda: all(one.others.num_in_flight == 1 for one in admissions))
        refused = await generate(pair.cluster(0), request_for(request_id="one-more"))
        assert isinstance(refused.error, Overloaded)
        assert "the limit is 2" in str(refused.error)
        for number in (0, 1):
            await pair.stubs[number].Abort(inference_pb2.AbortRequest(request_id=f"r{number}"))
        await asyncio.wait(streams)
        await eventually(lambda: all(one.others.num_in_flight == 0 for one in admissions))
        admissions[0].admit()
