"""Calls to the Handoff service of other workers, made for the rank."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from pdserve.errors import PdserveError
from pdserve.rpc.codec import error_to_wire
from pdserve.rpc.server import open_channel
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import handoff_pb2_grpc, rank_pb2

Answer = TypeVar("Answer")

MAX_CHANNELS = 64
"""A worker that restarts comes back at another address: channels to its past lives must go."""
CLOSE_GRACE_S = 60.0
"""Longer than any call's deadline: a channel that is let go finishes its calls."""


class PeerCalls:
    """Keeps one gRPC channel per peer address; the least recently used makes room."""

    def __init__(self, max_channels: int = MAX_CHANNELS) -> None:
        self._max_channels = max_channels
        self._channels: dict[str, grpc.aio.Channel] = {}
        """Least recently used first."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Peers with an open channel, the least recently used first."""
        return tuple(self._channels)

    async def call(self, request: rank_pb2.PeerCall) -> rank_pb2.PeerReply:
        """Makes the call with its deadline; a failure is part of the reply, never raised."""
        try:
            return await self._dispatch(request)
        except PdserveError as error:
            return rank_pb2.PeerReply(error=error_to_wire(error))

    async def _dispatch(self, request: rank_pb2.PeerCall) -> rank_pb2.PeerReply:
        stub = handoff_pb2_grpc.HandoffStub(self._channel(request.address))
        timeout_s = request.timeout_s
        match request.WhichOneof("call"):
            case "reserve":
                reserve = await _typed(stub.Reserve(request.reserve, timeout=timeout_s))
                return rank_pb2.PeerReply(reserve=reserve)
            case "commit":
                commit = await _typed(stub.Commit(request.commit, timeout=timeout_s))
                return rank_pb2.PeerReply(commit=commit)
            case "abort":
                abort = await _typed(stub.Abort(request.abort, timeout=timeout_s))
                return rank_pb2.PeerReply(abort=abort)
            case "renew":
                renew = await _typed(stub.Renew(request.renew, timeout=timeout_s))
                return rank_pb2.PeerReply(renew=renew)
            case other:
                raise AssertionError(f"unknown peer call: {other}")

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address)
        self._channels[address] = channel
        if len(self._channels) > self._max_channels:
            oldest = self._channels.pop(next(iter(self._channels)))
            task = asyncio.get_running_loop().create_task(oldest.close(CLOSE_GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return channel

    async def close(self) -> None:
        """Closes every channel."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _typed(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
