"""The floor under the router's CPU per token: a gRPC server that writes ready messages.

`python -m benchmarks.grpc_floor`. The same 64 streams, message size and pace as in `router`, but no
worker, no detokenization, no state: what is left is grpc.aio and the kernel.
"""

import asyncio
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import uvloop

from benchmarks.processes import cpu_s, first_line, running
from benchmarks.report import Row, write
from benchmarks.streams import NUM_RUNS, NUM_STREAMS, OUTPUT_TOKENS, PACED_S, read_stream
from pdserve.rpc.server import make_server, open_channel
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc


class Writer(inference_pb2_grpc.InferenceServicer):
    """Writes to all streams at each tick."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        loop = asyncio.get_running_loop()
        chunk = inference_pb2.TokenChunk(token_ids=[1234], text=" hello")
        response = inference_pb2.GenerateResponse(request_id=request.request_id, chunk=chunk)
        for _ in range(OUTPUT_TOKENS):
            ready = loop.create_future()
            self._waiting.append(ready)
            await ready
            await context.write(response)
            response.sequence += 1

    async def tick(self) -> None:
        """Wakes all handlers for ever."""
        while True:
            await asyncio.sleep(PACED_S)
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one.set_result(None)


async def serve() -> None:
    writer = Writer()
    server = make_server()
    port = server.bind("127.0.0.1", 0)
    inference_pb2_grpc.add_InferenceServicer_to_server(writer, server.grpc_server)
    await server.start()
    print(f"listening 127.0.0.1:{port}", flush=True)
    await writer.tick()


async def load(address: str) -> int:
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        requests = [
            inference_pb2.GenerateRequest(request_id=f"gen-{number:024d}")
            for number in range(NUM_STREAMS)
        ]
        found = await asyncio.gather(*(read_stream(stub.Generate(one)) for one in requests))
    return sum(messages for _, messages in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """A running bare server."""

    pid: int
    address: str

    async def measure_us(self) -> float:
        """Runs the load once and returns what a message cost the server."""
        before_s = cpu_s(self.pid)
        num_messages = await load(self.address)
        return (cpu_s(self.pid) - before_s) / num_messages * 1e6


@contextmanager
def serving_floor() -> Iterator[Floor]:
    """Starts a bare server."""
    with running("benchmarks.grpc_floor", "serve") as child:
        yield Floor(pid=child.pid, address=first_line(child, "listening").split()[1])


def main() -> None:
    """Serves when asked to, else measures a child that does."""
    if sys.argv[1:] == ["serve"]:
        uvloop.run(serve())
        return
    with serving_floor() as floor:
        uvloop.run(floor.measure_us())
        runs_us = [uvloop.run(floor.measure_us()) for _ in range(NUM_RUNS)]
    row = Row(
        name="bare grpc.aio server: CPU per message",
        value=statistics.median(runs_us),
        unit="us",
        details={"runs_us": [round(one, 1) for one in runs_us]},
    )
    write("grpc_floor", f"{NUM_STREAMS} streams, one message each {PACED_S * 1e3:g} ms", [row])


if __name__ == "__main__":
    main()
