import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.face.peers import PeerCalls
from pdserve.rpc.server import make_server
from pdserve.rpc.v1 import handoff_pb2, handoff_pb2_grpc, rank_pb2


class SlowDecode(handoff_pb2_grpc.HandoffServicer):
    """Answers a renewal when it is told to."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.was_asked = asyncio.Event()

    async def Renew(self, request, context):
        self.was_asked.set()
        await self.may_answer.wait()
        return handoff_pb2.RenewResponse(is_alive=[True])


@pytest.fixture
async def decode() -> AsyncIterator[tuple[SlowDecode, str]]:
    service, server = SlowDecode(), make_server()
    port = server.bind("127.0.0.1", 0)
    handoff_pb2_grpc.add_HandoffServicer_to_server(service, server.grpc_server)
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await server.stop()


def renew(address: str) -> rank_pb2.PeerCall:
    return rank_pb2.PeerCall(address=address, timeout_s=5.0, renew=handoff_pb2.RenewRequest())


async def test_channels_to_past_lives_are_let_go_but_their_calls_end(
    decode: tuple[SlowDecode, str],
) -> None:
    service, address = decode
    peers = PeerCalls(max_channels=2)
    call = asyncio.ensure_future(peers.call(renew(address)))
    await service.was_asked.wait()
    for port in (1, 2):
        reply = await peers.call(renew(f"127.0.0.1:{port}"))
        assert reply.HasField("error")
    assert peers.addresses == ("127.0.0.1:1", "127.0.0.1:2")
    service.may_answer.set()
    assert list((await call).renew.is_alive) == [True]
    await peers.close()


async def test_a_peer_that_is_called_again_keeps_its_channel() -> None:
    peers = PeerCalls(max_channels=2)
    for port in (1, 2, 1, 3):
        await peers.call(renew(f"127.0.0.1:{port}"))
    assert peers.addresses == ("127.0.0.1:1", "127.0.0.1:3")
    await peers.close()
