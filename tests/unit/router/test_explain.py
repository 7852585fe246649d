"""What a request can tell of itself: its choices, its critical path, and to whom."""

from pathlib import Path

import grpc
import httpx
import pytest

from pdserve.errors import RequestNotFound
from pdserve.request import RequestId
from pdserve.rpc.v1 import inference_pb2, worker_pb2
from router.explain import MAX_EXPLAINED, ExplainLog, Explanation, find_critical_path
from router.timing import RequestTimes
from tests.support.fake_worker import Script
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.router_harness import Cluster, generate, request_for, run_cluster


def _explanation(name: str, tenant: str = "a") -> Explanation:
    return Explanation(
        request_id=RequestId(name),
        tenant=tenant,
        num_prompt_tokens=1,
        state="OK",
        placements=(),
        ttft_s=None,
        critical_path=(),
        tpot_s=None,
    )


def test_the_log_is_bounded_and_keeps_the_latest() -> None:
    log = ExplainLog()
    for number in range(MAX_EXPLAINED + 1):
        log.add(_explanation(str(number)))
    with pytest.raises(RequestNotFound):
        log.find(RequestId("0"), "a")
    assert log.find(RequestId("1"), "a").request_id == "1"


def test_E12_another_tenant_s_request_is_not_there() -> None:
    log = ExplainLog()
    log.add(_explanation("r", tenant="a"))
    with pytest.raises(RequestNotFound):
        log.find(RequestId("r"), "b")


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


def test_a_worker_s_words_never_make_the_path_longer_than_it_was() -> None:
    times = RequestTimes(0.0)
    times.note_tokens(1, 1.0)
    times.note_stages(1, worker_pb2.StageTimes(queue_s=5.0, prefill_s=5.0))
    assert find_critical_path(times, ()) == ()
