"""A role without an engine, for tests of the launcher: `python stand_in_role.py ROLE FLAGS`.

A worker registers, beats, and keeps one idle "rank" process. The router counts workers. Steered by
the `reject_reservations` fault: 2 refuses to start as a bad setting would, 3 crashes at start, 4
never registers, 5 does not end when it is told to.
"""

import asyncio
import contextlib
import os
import signal
import sys

import grpc

from pdserve.config.load import from_argv, read_environment
from pdserve.config.router import RouterConfig
from pdserve.config.worker import WorkerConfig
from pdserve.process import spawn
from pdserve.registry.base import RegistryUnavailable
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Incarnation, Role
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.records import make_record


def stopped() -> asyncio.Event:
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    return event


async def pause(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def work(config: WorkerConfig) -> int:
    rank = spawn([sys.executable, "-c", "import time; time.sleep(600)"], name="rank")
    record = make_record(
        config.worker_id,
        config.role,
        incarnation=Incarnation(int.from_bytes(os.urandom(8))),
        face_pid=os.getpid(),
        rank_pids=(rank.pid,),
    )
    print(f"{config.worker_id} serves", flush=True)
    stop = stopped()
    if config.faults.reject_reservations == 5:
        stop = asyncio.Event()
    async with RedisRegistry(config.redis_url, config.cluster) as registry:
        while not stop.is_set() and rank.poll() is None:
            try:
                if config.faults.reject_reservations != 4:
                    await registry.register(record, config.registry_lease_s)
            except RegistryUnavailable:
                pass
            await pause(stop, 0.1)
        with contextlib.suppress(RegistryUnavailable):
            await registry.deregister(record.worker_id, record.incarnation)
    rank.kill()
    rank.wait()
    return 0 if stop.is_set() else 1


async def hold() -> int:
    await stopped().wait()
    return 0


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, registry: RedisRegistry) -> None:
        self.registry = registry

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: object
    ) -> inference_pb2.GetServerInfoResponse:
        roles = [record.role for record in await self.registry.list_workers()]
        return inference_pb2.GetServerInfoResponse(
            num_prefill=roles.count(Role.PREFILL), num_decode=roles.count(Role.DECODE)
        )


async def route(config: RouterConfig) -> int:
    stop = stopped()
    server = grpc.aio.server()
    async with RedisRegistry(config.redis_url, config.cluster) as registry:
        inference_pb2_grpc.add_InferenceServicer_to_server(Inference(registry), server)
        server.add_insecure_port(f"{config.host}:{config.port}")
        await server.start()
        print("router serves", flush=True)
        await stop.wait()
        print("router drains", flush=True)
        await server.stop(0)
    return 0


def main() -> int:
    role, argv = sys.argv[1], sys.argv[2:]
    if role == "router":
        return asyncio.run(
            route(from_argv(RouterConfig, argv, read_environment(), program="stand-in"))
        )
    if role == "stage":
        return asyncio.run(hold())
    fixed = {"role": Role(role.removesuffix("-worker"))}
    config = from_argv(WorkerConfig, argv, read_environment(), program="stand-in", fixed=fixed)
    if config.faults.reject_reservations == 2:
        print("max_num_seqs must be at least 1, got 0", file=sys.stderr)
        return 2
    if config.faults.reject_reservations == 3:
        print("Traceback: something broke", file=sys.stderr)
        return 1
    return asyncio.run(work(config))


if __name__ == "__main__":
    sys.exit(main())
