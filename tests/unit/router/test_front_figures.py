"""What a front tells of itself and of its workers: health, loads, waits, log lines, series."""

import asyncio
import json
import logging

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.log import JsonFormatter
from pdserve.request import Role
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, types_pb2
from tests.support.fake_script import Script
from tests.support.router_harness import Cluster, eventually, generate, request_for


async def test_health_follows_the_pools(cluster):
    async with open_channel(f"127.0.0.1:{cluster.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="pdserve.rpc.v1.Inference")
        assert (await health.Check(asked)).status == 2
        await cluster.add_pair()
        while (await health.Check(asked)).status != 1:
            pass
        await cluster.worker("d0").die()
        while (await health.Check(asked)).status != 2:
            pass


async def test_loads_show_every_worker_even_a_frozen_one(cluster):
    await cluster.add_pair()
    frozen = await cluster.add("d1")
    await cluster.ready(3)
    frozen.is_frozen = True
    answer = await cluster.stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=5)
    by_id = {worker.worker_id: worker for worker in answer.workers}
    assert sorted(by_id) == ["d0", "d1", "p0"]
    assert by_id["d0"].rank_pids == [1001]
    assert by_id["d0"].links[0].transport == "fake"
    assert by_id["d1"].state == "silent"
    info = await cluster.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
    assert (info.num_prefill, info.num_decode) == (1, 2)


def _decode_sample(seconds: float) -> types_pb2.StepSample:
    return types_pb2.StepSample(seconds=seconds, decode=types_pb2.DecodeStep(num_sequences=1))


async def test_loads_come_with_the_samples_of_all_reports_that_the_caller_has_not_had(cluster):
    await cluster.add_pair()
    worker = cluster.worker("d0")
    for number in (1, 2, 3):
        worker.report(_decode_sample(float(number)))

    async def told(**wanted: object) -> list[float]:
        request = inference_pb2.GetLoadsRequest(**wanted)
        answer = await cluster.stub.GetLoads(request, timeout=5)
        (load,) = [one.load for one in answer.workers if one.worker_id == "d0"]
        return [sample.seconds for sample in load.samples]

    def seen(report: int, incarnation: int = worker.incarnation) -> dict[str, object]:
        one = types_pb2.SeenReport(incarnation=incarnation, report=report)
        return {"wants_past_samples": True, "seen": {"d0": one}}

    assert await told() == [3.0]
    assert await told(wants_past_samples=True) == [1.0, 2.0, 3.0]
    assert await told(**seen(1)) == [2.0, 3.0]
    assert await told(**seen(3)) == []
    # What was seen of another life is nothing of this one.
    assert await told(**seen(3, incarnation=5)) == [1.0, 2.0, 3.0]


async def test_figures_from_memory_are_no_report_of_the_worker(cluster):
    await cluster.add_pair()
    worker = cluster.worker("d0")
    worker.report(_decode_sample(1.0))
    link = cluster.front.pool.link(worker.key)
    await eventually(lambda: link.load is not None and link.load.report == 1)
    worker.is_frozen = True
    answer = await cluster.stub.GetLoads(
        inference_pb2.GetLoadsRequest(wants_past_samples=True), timeout=5
    )
    (info,) = [one for one in answer.workers if one.worker_id == "d0"]
    assert info.state == "silent"
    assert (info.load.report, len(info.load.samples)) == (0, 0)


async def _oldest_wait_s(cluster: Cluster) -> float:
    info = await cluster.stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
    return info.oldest_wait_s


async def test_prompt_that_a_worker_computes_waits_for_nobody_and_any_other_one_does(cluster):
    prefill = await cluster.add("p0", Script(hold_first_token_s=30.0))
    await cluster.add("d0")
    await cluster.ready(2)
    link = cluster.front.pool.link(prefill.key)

    async def says(*names: str) -> None:
        prefill.computing = list(names)
        await eventually(lambda: link.load is not None and tuple(link.load.computing) == names)

    calls = [asyncio.create_task(generate(cluster, request_for(request_id="long")))]
    await eventually(lambda: len(prefill.specs) == 1)
    assert await _oldest_wait_s(cluster) > 0
    await says("long")
    assert await _oldest_wait_s(cluster) == 0
    calls.append(asyncio.create_task(generate(cluster, request_for(request_id="behind"))))
    await eventually(lambda: len(prefill.specs) == 2)
    behind_s = await _oldest_wait_s(cluster)
    await says()
    # Nobody vouches for the first one any more: all of its age counts.
    assert 0 < behind_s < await _oldest_wait_s(cluster)
    await says("long", "behind")
    assert await _oldest_wait_s(cluster) == 0
    await prefill.die()
    await eventually(lambda: cluster.front.pool.num_available(Role.PREFILL) == 0)
    assert await _oldest_wait_s(cluster) > 0
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_loads_are_answered_when_a_worker_is_lost_in_the_middle(cluster):
    await cluster.add_pair()
    frozen = await cluster.add("d1")
    await cluster.ready(3)
    frozen.is_frozen = True
    call = cluster.stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=5)
    await eventually(lambda: frozen.num_status_calls == 1)
    cluster.front.pool.link(frozen.key).lose("silent")
    states = {worker.worker_id: worker.state for worker in (await call).workers}
    assert states == {"p0": "ready", "d0": "ready", "d1": "lost"}


async def test_E10_the_log_line_of_a_request_holds_no_content(cluster, caplog):
    await cluster.add_pair()
    caplog.set_level(logging.INFO)
    request = request_for(max_tokens=3)
    request.text = "secret-key-123\r\nforged line \x1b[31m"
    result = await generate(cluster, request)
    await cluster.quiet()
    lines = [JsonFormatter({}).format(record) for record in caplog.records]
    assert not [line for line in lines if "secret" in line or "forged" in line]
    (line,) = [line for line in map(json.loads, lines) if line["message"] == "request finished"]
    assert line["request_id"] == result.request_id
    assert line["output_tokens"] == 3
    assert line["status"] == "OK"


async def test_E11_series_do_not_grow_with_requests(cluster):
    await cluster.add_pair()

    def count() -> int:
        families = cluster.front.metrics_registry.collect()
        return sum(len(family.samples) for family in families)

    for _ in range(2):
        await generate(cluster, request_for(max_tokens=2))
    await generate(cluster, request_for(n=9))
    before = count()
    for number in range(5):
        await generate(cluster, request_for(request_id=f"r{number}", max_tokens=2))
        await generate(cluster, request_for(n=9 + number))
    assert count() == before
