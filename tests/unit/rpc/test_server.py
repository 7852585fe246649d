import socket

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.errors import ConfigError
from pdserve.rpc.server import make_server, open_channel
from pdserve.rpc.v1 import inference_pb2

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
Status = health_pb2.HealthCheckResponse.ServingStatus


async def test_health_switches_for_the_empty_and_the_named_service():
    server = make_server(INFERENCE)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for is_serving, expected in ((None, 2), (True, 1), (False, 2)):
                if is_serving is not None:
                    await server.set_serving(is_serving)
                for name in ("", INFERENCE):
                    request = health_pb2.HealthCheckRequest(service=name)
                    answer = await stub.Check(request, timeout=5)
                    assert answer.status == expected
    finally:
        await server.stop()


async def test_reflection_lists_the_service():
    server = make_server(INFERENCE)
    port = server.bind("localhost", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=5):
                names = {service.name for service in answer.list_services_response.service}
                break
        assert INFERENCE in names
    finally:
        await server.stop()


async def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port {port} is already in use") as caught:
            make_server().bind("127.0.0.1", port)
    assert "\n" not in str(caught.value)


async def test_two_servers_never_share_a_port():
    first = make_server()
    port = first.bind("127.0.0.1", 0)
    await first.start()
    try:
        with pytest.raises(ConfigError, match="in use"):
            make_server().bind("127.0.0.1", port)
    finally:
        await first.stop()


@pytest.mark.parametrize("port", [-1, 65_536])
async def test_an_impossible_port_is_named(port):
    with pytest.raises(ConfigError, match=str(port)):
        make_server().bind("127.0.0.1", port)


async def test_an_unknown_host_is_named():
    with pytest.raises(ConfigError, match="does not resolve"):
        make_server().bind("no-such-host.invalid", 0)
