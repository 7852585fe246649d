"""Watches the gRPC health of one server from the side."""

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.faults import wait_for


class HealthWatch:
    """All states that a server has told since the watch began."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.states: list[str] = []
        self._channel = channel
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                self.states.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
        except grpc.aio.AioRpcError:
            self.states.append("GONE")

    async def wait_for(self, state: str, timeout_s: float) -> float:
        """Waits for a state; returns the seconds that it took."""
        started_s = time.monotonic()
        await wait_for(lambda: state in self.states, timeout_s, f"health {state}")
        return time.monotonic() - started_s

    async def stop(self) -> list[str]:
        """Ends the watch and returns what was told."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self._channel.close()
        return self.states


async def watch_health(channel: grpc.aio.Channel) -> HealthWatch:
    """Begins to watch, and returns once the first state is known; takes the channel over."""
    watch = HealthWatch(channel)
    await wait_for(lambda: bool(watch.states), 20.0, "a first state of health")
    return watch
