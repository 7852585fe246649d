"""A client's trace id, from either protocol to every worker and into the log."""

import logging

import pytest

from tests.support.http_client import add_pair, http_client
from tests.support.router_harness import PROMPT, request_for

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VALID = f"00-{TRACE}-00f067aa0ba902b7-01"
INVALID = f"00-{TRACE}-0000000000000000-01"


def finished(caplog):
    return [r for r in caplog.records if r.message == "request finished"]


def traces_at_workers(cluster):
    specs = [spec for worker in cluster.network.workers.values() for spec in worker.specs]
    return [spec.trace_id if spec.HasField("trace_id") else None for spec in specs]


@pytest.mark.parametrize(("given", "expected"), [(VALID, TRACE), (INVALID, None)])
async def test_grpc_metadata_reaches_workers_and_the_log(cluster, caplog, given, expected):
    caplog.set_level(logging.INFO)
    await add_pair(cluster)
    call = cluster.stub.Generate(request_for(), metadata=(("traceparent", given),))
    assert [message async for message in call][-1].HasField("completion")
    assert traces_at_workers(cluster) == [expected]
    assert [record.trace_id for record in finished(caplog)] == [expected]


@pytest.mark.parametrize(("given", "expected"), [(VALID, TRACE), (INVALID, None)])
async def test_an_http_header_reaches_workers_and_the_log(cluster, caplog, given, expected):
    caplog.set_level(logging.INFO)
    await add_pair(cluster)
    headers = {"traceparent": given, "tracestate": "a=b", "x-request-id": "mine"}
    async with http_client(cluster) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert traces_at_workers(cluster) == [expected]
    (record,) = finished(caplog)
    assert (record.trace_id, record.http_request_id) == (expected, "mine")


async def test_the_next_attempt_keeps_the_trace(cluster, caplog):
    caplog.set_level(logging.INFO)
    await add_pair(cluster, return_before=3)
    call = cluster.stub.Generate(request_for(), metadata=(("traceparent", VALID),))
    assert [message async for message in call][-1].HasField("completion")
    assert traces_at_workers(cluster) == [TRACE, TRACE]
    again = [r for r in caplog.records if r.message == "next attempt"]
    assert [record.trace_id for record in again] == [TRACE]


async def test_one_http_request_is_one_line_of_the_log(cluster, caplog):
    await add_pair(cluster)
    async with http_client(cluster) as client:
        caplog.set_level(logging.INFO)
        for _ in range(3):
            body = {"prompt": list(PROMPT), "max_tokens": 2, "n": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    of_requests = [r.message for r in caplog.records if hasattr(r, "request_id")]
    assert of_requests == ["request finished"] * 3
