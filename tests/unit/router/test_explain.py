"""What a request can tell of itself: its choices, its critical path, and to whom."""

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
from rich.console import Console

from launcher.commands.explain import show
from pdserve.errors import RequestNotFound
from pdserve.request import RequestId
from pdserve.rpc.v1 import inference_pb2, worker_pb2
from router.explain import (
    MAX_EXPLAINED,
    MAX_NAMESAKES,
    ExplainLog,
    Explanation,
    choose_latest,
    find_critical_path,
)
from router.timing import RequestTimes
from tests.support.fake_script import Script
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.router_harness import Cluster, eventually, generate, request_for, run_cluster


def _explanation(name: str, tenant: str = "a", http_request_id: str | None = None) -> Explanation:
    return Explanation(
        request_id=RequestId(name),
        tenant=tenant,
        num_prompt_tokens=1,
        state="OK",
        placements=(),
        ttft_s=None,
        critical_path=(),
        tpot_s=None,
        http_request_id=http_request_id,
    )


def test_the_log_is_bounded_and_keeps_the_latest() -> None:
    log = ExplainLog()
    for number in range(MAX_EXPLAINED + 1):
        log.add(_explanation(str(number)))
    assert log.find(RequestId("0"), "a") is None
    found = log.find(RequestId("1"), "a")
    assert found is not None
    assert found.request_id == "1"


def test_E12_another_tenant_s_request_is_not_there() -> None:
    log = ExplainLog()
    log.add(_explanation("r", tenant="a", http_request_id="h"))
    assert log.find(RequestId("r"), "b") is None
    assert log.of_http_call("h", "b") == []


def test_of_several_http_calls_of_one_name_the_latest_is_told_and_some_others_named() -> None:
    log = ExplainLog()
    for number in range(MAX_NAMESAKES + 2):
        log.add(_explanation(str(number), http_request_id="h"))
    log.add(_explanation("other", http_request_id="else"))
    log.add(_explanation("no call"))
    found = choose_latest(log.of_http_call("h", "a"))
    assert found.request_id == str(MAX_NAMESAKES + 1)
    assert found.namesakes == tuple(str(number) for number in range(1, MAX_NAMESAKES + 1))
    with pytest.raises(RequestNotFound):
        choose_latest(log.of_http_call("nobody", "a"))


def test_before_the_first_token_there_is_no_path() -> None:
    assert find_critical_path(RequestTimes(10.0), ()) == ()


async def _explain(cluster: Cluster, request_id: str) -> inference_pb2.ExplainResponse:
    return await cluster.stub.Explain(
        inference_pb2.ExplainRequest(request_id=request_id), timeout=5
    )


async def test_a_choice_is_told_with_its_candidates(tiny_llama_folder: Path) -> None:  # noqa: F811
    async with run_cluster(tiny_llama_folder) as cluster:
        for name in ("p0", "p1", "d0"):
            await cluster.add(name)
        await cluster.ready(3)
        result = await generate(cluster, request_for(request_id="r1"))
        assert result.completion is not None
        found = await _explain(cluster, "r1")
        assert found.state == "OK"
        (placed,) = found.placements
        assert (placed.path, placed.unit, placed.attempt) == ("disaggregated", "blocks", 1)
        assert len(placed.candidates) == 2
        assert placed.candidates[0].cost <= placed.candidates[1].cost
        total_s = sum(part.seconds for part in found.critical_path)
        assert total_s == pytest.approx(found.ttft_s, abs=1e-6)
        assert found.ttft_s == pytest.approx(result.completion.timeline.ttft_s)


async def test_attempts_that_failed_before_the_first_token_have_their_part(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with run_cluster(tiny_llama_folder) as cluster:
        await cluster.add("p0", Script(die_before=0))
        await cluster.add("d0")
        await cluster.ready(2)
        call = cluster.stub.Generate(request_for(request_id="r1"), timeout=20)
        await cluster.add("p1")
        async for _ in call:
            pass
        found = await _explain(cluster, "r1")
        parts = {part.name: part.seconds for part in found.critical_path}
        assert len(found.placements) > 1
        assert parts["retries"] > 0
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(found.ttft_s, abs=1e-6)


async def test_a_stream_s_trailer_tells_it_in_short(tiny_llama_folder: Path) -> None:  # noqa: F811
    async with run_cluster(tiny_llama_folder) as cluster:
        for name in ("p0", "d0"):
            await cluster.add(name)
        await cluster.ready(2)
        call = cluster.stub.Generate(request_for(), timeout=20)
        async for _ in call:
            pass
        trailers = dict(await call.trailing_metadata())
        assert "path=disaggregated" in trailers["pdserve-explain"]
        assert " ttft=" in trailers["pdserve-explain"]


async def test_an_unknown_request_is_not_found_by_either_protocol(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with run_cluster(tiny_llama_folder) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _explain(cluster, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        base = f"http://127.0.0.1:{cluster.front.http_port}"
        async with httpx.AsyncClient(base_url=base) as client:
            answer = await client.get("/v1/requests/nobody/explain")
            assert answer.status_code == 404


async def test_http_tells_the_same(tiny_llama_folder: Path) -> None:  # noqa: F811
    async with run_cluster(tiny_llama_folder) as cluster:
        for name in ("p0", "d0"):
            await cluster.add(name)
        await cluster.ready(2)
        await generate(cluster, request_for(request_id="r1"))
        base = f"http://127.0.0.1:{cluster.front.http_port}"
        async with httpx.AsyncClient(base_url=base) as client:
            shown = (await client.get("/v1/requests/r1/explain")).json()
        assert shown["request_id"] == "r1"
        assert shown["placements"][0]["candidates"][0]["prefill_worker"] == "p0"
        assert sum(part["seconds"] for part in shown["critical_path"]) == pytest.approx(
            shown["ttft_s"], abs=1e-6
        )


async def test_a_request_is_found_by_the_x_request_id_that_its_client_sent_or_got(
    text_folder: Path,
) -> None:
    async with run_cluster(text_folder) as cluster:
        await cluster.add("p0")
        await cluster.add("d0", script := Script())
        await cluster.ready(2)
        base = f"http://127.0.0.1:{cluster.front.http_port}"
        async with httpx.AsyncClient(base_url=base) as client:

            async def ask(prompt: object, name: str | None = None) -> tuple[str, str]:
                body = {"prompt": prompt, "max_tokens": 2}
                headers = {} if name is None else {"x-request-id": name}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                return answer.json()["id"], answer.headers["x-request-id"]

            made_id, made_up = await ask("a")
            await ask(["b", "c"], "mine")
            own_id, _ = await ask("d", "mine")
            found = await _explain(cluster, made_up)
            assert (found.request_id, found.http_request_id) == (made_id, made_up)
            assert not found.namesakes
            found = await _explain(cluster, "mine")
            assert found.request_id == own_id
            assert len(found.namesakes) == 2
            shown = (await client.get("/v1/requests/mine/explain")).json()
            assert (shown["request_id"], shown["http_request_id"]) == (own_id, "mine")

            # One that runs is later than all that have ended; and an id goes before a name.
            script.token_delay_s = 60.0
            running = asyncio.create_task(ask("e", "mine"))
            await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
            found = await _explain(cluster, "mine")
            assert (found.state, len(found.namesakes)) == ("running", 3)
            running.cancel()
            await asyncio.wait((running,))
            await eventually(lambda: cluster.front.dispatcher.num_in_flight == 0)
            script.token_delay_s = 0.0
            await generate(cluster, request_for(request_id="mine"))
            assert (await _explain(cluster, "mine")).http_request_id == ""


def test_the_command_shows_how_else_a_request_is_called() -> None:
    console = Console(width=160)
    found = inference_pb2.ExplainResponse(
        request_id="cmpl-1", state="OK", http_request_id="mine", namesakes=["cmpl-0", "cmpl-2"]
    )
    with console.capture() as capture:
        show(found, console)
    assert capture.get().splitlines() == [
        "cmpl-1: OK, 0 prompt tokens, X-Request-Id mine",
        "others of this X-Request-Id: cmpl-0, cmpl-2",
    ]


def test_a_worker_s_words_never_make_the_path_longer_than_it_was() -> None:
    times = RequestTimes(0.0)
    times.note_tokens(1, 1.0)
    times.note_stages(1, worker_pb2.StageTimes(queue_s=5.0, prefill_s=5.0))
    assert find_critical_path(times, ()) == ()
