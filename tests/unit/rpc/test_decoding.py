"""Bytes that are no message, sent to each kind of method."""

import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.rpc.server import make_server, open_channel


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_E1_bytes_that_are_no_message_are_refused_without_a_traceback(method, caplog):
    server = make_server()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")(
                b"\x80\x04\x95", timeout=5
            )
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request must be a message" in await call.details()
            asked = health_pb2.HealthCheckRequest()
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(asked, timeout=5)).status == 2
            assert (await stub.Watch(asked, timeout=5).read()).status == 2
    finally:
        await server.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_unknown_method_is_unimplemented():
    server = make_server()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/pdserve.rpc.v1.Inference/Nothing")(b"", timeout=5)
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop()
