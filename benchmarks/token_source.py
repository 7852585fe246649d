"""A decode worker without a model: as many tokens as the stream takes, or one round per interval.

`python -m benchmarks.token_source REDIS_URL CLUSTER INTERVAL_S`. One message carries one token of
each running sequence, as an engine's iteration does. The first token leaves with the submit.
"""

import asyncio
import random
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

import grpc
import uvloop

from pdserve.face.token_log import PROMPT_PIECE_ENTRIES
from pdserve.registry.base import WorkerRecord
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Incarnation, Role, WorkerId
from pdserve.rpc.server import make_server
from pdserve.rpc.v1 import types_pb2, worker_pb2, worker_pb2_grpc

MAX_MODEL_LEN = 1 << 20
LOAD_INTERVAL_S = 0.4


def score_prompt(spec: types_pb2.RequestSpec) -> Iterator[worker_pb2.SequenceUpdate]:
    """Yields the log-probs of a prompt in pieces, as a face does."""
    num_top = spec.sampling.prompt_logprobs
    top = [
        types_pb2.TopLogprob(token_id=400 + rank, logprob=-rank - 0.5) for rank in range(num_top)
    ]
    step = PROMPT_PIECE_ENTRIES // (num_top + 1)
    for start in range(1, spec.num_prompt_tokens, step):
        scores = [
            types_pb2.TokenLogprob(token_id=token_id, logprob=-1.25, top=top)
            for token_id in spec.token_ids[start : start + step]
        ]
        yield worker_pb2.SequenceUpdate(
            request_id=spec.request_id,
            attempt=spec.attempt,
            first_index=len(spec.token_ids) - spec.num_prompt_tokens,
            prompt_logprobs=worker_pb2.PromptLogprobs(first_position=start, logprobs=scores),
        )


class _Sequence:
    """One request."""

    def __init__(self, spec: types_pb2.RequestSpec) -> None:
        self.request_id = spec.request_id
        self.attempt = spec.attempt
        self.next_index = len(spec.token_ids) - spec.num_prompt_tokens
        self.end = spec.sampling.max_tokens
        has_scores = spec.sampling.HasField("prompt_logprobs")
        self.scores = score_prompt(spec) if has_scores else iter(())
        """Leave before any token, one piece a step."""

    @property
    def is_over(self) -> bool:
        return self.next_index >= self.end

    def step(self, tokens: list[int]) -> worker_pb2.SequenceUpdate:
        """Makes one token, or one piece of the prompt's log-probs."""
        piece = next(self.scores, None)
        if piece is not None:
            return piece
        index = self.next_index
        self.next_index += 1
        update = worker_pb2.SequenceUpdate(
            request_id=self.request_id,
            attempt=self.attempt,
            first_index=index,
            token_ids=(tokens[index % len(tokens)],),
        )
        if self.is_over:
            update.finished.reason = types_pb2.FINISH_REASON_LENGTH
        return update


class TokenSource(worker_pb2_grpc.WorkerServicer):
    """Serves one front."""

    def __init__(self, interval_s: float) -> None:
        self.incarnation = Incarnation(secrets.randbits(63))
        self._interval_s = interval_s
        self._running: defaultdict[str, dict[str, _Sequence]] = defaultdict(dict)
        """By front, by request."""
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        numbers = random.Random(7)
        self._tokens = [numbers.randrange(300, 40_000) for _ in range(4096)]

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SubmitResponse:
        spec = request.request
        self._running[spec.front_id][spec.request_id] = _Sequence(spec)
        self._news[spec.front_id].set()
        return worker_pb2.SubmitResponse()

    async def Cancel(
        self, request: worker_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CancelResponse:
        for running in self._running.values():
            running.pop(request.request_id, None)
        return worker_pb2.CancelResponse()

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetStatusResponse:
        return worker_pb2.GetStatusResponse()

    async def Stream(
        self, request: worker_pb2.StreamRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StreamBatch]:
        due_s = time.monotonic()
        running, news = self._running[request.front_id], self._news[request.front_id]
        yield self._batch([])
        while True:
            if not running:
                news.clear()
                try:
                    async with asyncio.timeout(LOAD_INTERVAL_S):
                        await news.wait()
                except TimeoutError:
                    pass  # time to send load figures
            updates = [one.step(self._tokens) for one in running.values()]
            for request_id in [key for key, one in running.items() if one.is_over]:
                del running[request_id]
            yield self._batch(updates)
            due_s = max(due_s + self._interval_s, time.monotonic() - self._interval_s)
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)

    def _batch(self, updates: list[worker_pb2.SequenceUpdate]) -> worker_pb2.StreamBatch:
        load = types_pb2.WorkerLoad(num_running=len(updates))
        return worker_pb2.StreamBatch(incarnation=self.incarnation, updates=updates, load=load)


async def main() -> None:
    redis_url, cluster, interval = sys.argv[1:4]
    source = TokenSource(float(interval))
    server = make_server()
    port = server.bind("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServicer_to_server(source, server.grpc_server)
    await server.start()
    record = WorkerRecord(
        worker_id=WorkerId("decode-0"),
        role=Role.DECODE,
        incarnation=source.incarnation,
        address=f"127.0.0.1:{port}",
        metrics_address="",
        state="ready",
        compatibility_digest=b"same",
        geometry="num_layers=2 dtype=float32",
        model="fake",
        max_model_len=MAX_MODEL_LEN,
        total_blocks=1_000_000,
        block_size=16,
        face_pid=1,
        rank_pids=(1,),
    )
    async with RedisRegistry(redis_url, cluster) as registry:
        await registry.register(record, lease_s=3600)
        print(f"listening {record.address}", flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
    await server.stop()


if __name__ == "__main__":
    uvloop.run(main())
