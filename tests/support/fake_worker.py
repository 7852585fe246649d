"""Prefill and decode workers without a model, over real gRPC, with scripted faults.

The next token is a pure function of all tokens before it, so whatever dies, a request that is
continued rightly ends with `expected_tokens`. Tokens leave through the faces' own streams, so
resuming is the real thing; the hand-off itself is one call from a prefill to a decode object.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Protocol

import grpc

from pdserve.errors import NoWorker, StaleAttempt
from pdserve.face.streams import FrontStreams, Standing
from pdserve.face.token_log import TokenLog
from pdserve.registry.base import Registry, WorkerRecord
from pdserve.request import FrontId, Incarnation, RequestId, Role, WorkerId
from pdserve.rpc.server import RpcServer, make_server
from pdserve.rpc.status import abort_with
from pdserve.rpc.v1 import inference_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from pdserve.timeline import MonotonicClock
from router.policy import WorkerKey
from tests.support.fake_cache import FakeCache
from tests.support.fake_script import Script
from tests.support.fake_sequence import (
    Held,
    make_update,
    samples_of,
    tell_first_token,
    tell_handed_off,
    tell_refused,
    tell_scripted_end,
)
from tests.support.fake_tokens import next_token
from tests.support.records import make_record


class Peers(Protocol):
    """What a worker reaches, and where it leaves a note of what it was told."""

    registry: Registry
    submits: list[tuple[str, str, int]]
    cancels: list[tuple[str, str, int]]

    def decode(self, target: worker_pb2.DecodeTarget) -> "FakeWorker | None":
        """Returns a worker that a request can be handed to, if it lives."""


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One replica of a pool."""

    def __init__(
        self,
        network: Peers,
        worker_id: str,
        role: Role,
        script: Script,
        *,
        digest: bytes = b"same",
        total_blocks: int = 100_000,
        max_model_len: int = 4096,
        incarnation: int | None = None,
        port: int = 0,
    ) -> None:
        self.network = network
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.digest = digest
        self.total_blocks = total_blocks
        self.max_model_len = max_model_len
        number = incarnation if incarnation is not None else zlib.crc32(worker_id.encode())
        self.incarnation = Incarnation(number)
        self.key = WorkerKey(worker_id=WorkerId(worker_id), incarnation=self.incarnation)
        self.held: dict[str, Held] = {}
        self.fenced: dict[str, int] = {}
        self.is_alive = False
        self.is_frozen = False
        self.num_streams = 0
        self.num_status_calls = 0
        self.computing: list[str] = []
        """Whose prompts it says that it computes."""
        self.specs: list[types_pb2.RequestSpec] = []
        self.placements: list[tuple[str, int]] = []
        self.port = port
        self._clock = MonotonicClock()
        self._log = TokenLog(self._clock)
        self._streams = FrontStreams(self._log, self.incarnation, self._clock, self._stand)
        self._reported = types_pb2.WorkerLoad()
        self.cache = FakeCache(self.incarnation)
        self._server: RpcServer | None = None
        self._stream_breaks: list[asyncio.Event] = []
        self._thawed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = make_server()
        self.port = self._server.bind("127.0.0.1", self.port)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.grpc_server)
        await self._server.start()
        self.is_alive = True
        await self.register()

    def record(self) -> WorkerRecord:
        return make_record(
            self.worker_id,
            self.role,
            incarnation=self.incarnation,
            address=f"127.0.0.1:{self.port}",
            metrics_address="",
            state="draining" if self.script.is_draining else "ready",
            compatibility_digest=self.digest,
            geometry="num_layers=2 dtype=float32",
            max_model_len=self.max_model_len,
            total_blocks=self.total_blocks,
            face_pid=1000,
            rank_pids=(1001,),
        )

    async def register(self) -> None:
        await self.network.registry.register(self.record(), lease_s=3600)

    async def die(self) -> None:
        """Ends at once, sockets and all; the registry does not hear of it."""
        if not self.is_alive:
            return
        self.is_alive = False
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        assert self._server is not None
        await self._server.stop()

    def wake(self, request_id: str) -> None:
        """Ends a freeze: the request goes on where it stood, as if nothing had happened."""
        self.script.freeze_before = None
        self.is_frozen = False
        self._thawed.set()
        held = self.held[request_id]
        held.task = self._spawn(self._decode(held))

    async def _thaw(self) -> None:
        if self.is_frozen:
            await self._thawed.wait()

    def remember(self, samples: Sequence[types_pb2.StepSample]) -> None:
        """Has measured this before anybody listened."""
        self._streams.remember(types_pb2.WorkerLoad(samples=samples))

    def report(self, *samples: types_pb2.StepSample) -> None:
        """Has a heartbeat with what was measured since the last one."""
        self._streams.remember(self._reported)
        number = self._reported.report + 1
        self._reported = types_pb2.WorkerLoad(report=number, samples=samples)

    def break_streams(self) -> None:
        """Cuts all token streams; everything else goes on."""
        for event in self._stream_breaks:
            event.set()

    def _stand(self) -> Standing:
        load = types_pb2.WorkerLoad(num_running=len(self.held), computing=self.computing)
        load.MergeFrom(self._reported)
        return Standing(
            load=load, is_draining=self.script.is_draining, is_flipping=self.script.is_flipping
        )

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SubmitResponse:
        spec = request.request
        self.network.submits.append((self.worker_id, spec.request_id, spec.attempt))
        self.specs.append(spec)
        await self._thaw()
        if self.script.refuse_submits > 0:
            self.script.refuse_submits -= 1
            await abort_with(context, self.script.refusal)
        if self.script.is_draining:
            await abort_with(context, NoWorker("draining"))
        if self.fenced.get(spec.request_id, 0) >= spec.attempt:
            await abort_with(context, StaleAttempt("fenced"))
        if request.incarnation != self.incarnation:
            await abort_with(context, StaleAttempt("another incarnation"))
        target = request.decode if request.HasField("decode") else None
        if self.script.die_in_submit:
            self.script.die_in_submit = False
            await self.die()
        held = Held(spec, 0)
        self._drop(spec.request_id)
        self.held[spec.request_id] = held
        if target is None:
            self._start_samples(self.held.pop(spec.request_id))
        else:
            held.task = self._spawn(self._prefill(held, target))
        if self.script.hang_in_submit:
            self.script.hang_in_submit = False
            await asyncio.Event().wait()
        return worker_pb2.SubmitResponse()

    async def PlaceDecode(
        self, request: worker_pb2.PlaceDecodeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PlaceDecodeResponse:
        held = self.held.get(request.request_id)
        if held is None or held.spec.attempt != request.attempt:
            await abort_with(context, StaleAttempt("not held"))
        assert held is not None
        self.placements.append((request.request_id, request.decode.decode_attempt))
        held.task = self._spawn(self._hand_off(held, request.decode))
        return worker_pb2.PlaceDecodeResponse()

    async def Cancel(
        self, request: worker_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CancelResponse:
        await self._thaw()
        self.network.cancels.append((self.worker_id, request.request_id, request.attempt))
        fenced = max(self.fenced.get(request.request_id, 0), request.attempt)
        self.fenced[request.request_id] = fenced
        held = self.held.get(request.request_id)
        was_known = held is not None and held.spec.attempt <= request.attempt
        if was_known:
            self._drop(request.request_id)
        group = self.held.get(request.request_id.rpartition("#")[0])
        if group is not None and all(
            self.fenced.get(one.request_id, 0) >= one.attempt for one in samples_of(group.spec)
        ):
            self._drop(group.spec.request_id)
        self._log.forget(RequestId(request.request_id), request.attempt)
        return worker_pb2.CancelResponse(was_known=was_known)

    async def Stream(
        self, request: worker_pb2.StreamRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StreamBatch]:
        self.num_streams += 1
        broken = asyncio.Event()
        self._stream_breaks.append(broken)
        async for batch in self._streams.serve(request):
            if broken.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            await self._thaw()
            yield batch
            if self.script.repeat_updates and batch.updates:
                yield batch

    async def WatchCache(
        self, request: worker_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.CacheBatch]:
        async with aclosing(self.cache.watch(request, context)) as batches:
            async for batch in batches:
                yield batch

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetStatusResponse:
        self.num_status_calls += 1
        await self._thaw()
        info = inference_pb2.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.incarnation,
            state="ready",
            face_pid=1000,
            rank_pids=[1001],
            ledger=types_pb2.Ledger(sequences=len(self.held)),
            links=[inference_pb2.LinkInfo(peer_worker_id="other", transport="fake")],
            load=self._stand().load,
        )
        if request.HasField("seen"):
            is_ours = request.seen.incarnation == self.incarnation
            self._streams.fill_in(info.load, request.seen.report if is_ours else 0)
        return worker_pb2.GetStatusResponse(worker=info)

    async def _prefill(self, held: Held, target: worker_pb2.DecodeTarget) -> None:
        spec = held.spec
        index = len(spec.token_ids) - spec.num_prompt_tokens
        if not await self._survive(index, held):
            return
        is_last = index + 1 >= spec.sampling.max_tokens
        if is_last:
            self.held.pop(spec.request_id, None)
        for one in samples_of(spec):
            update = tell_first_token(spec, one, index)
            if is_last:
                update.finished.reason = types_pb2.FINISH_REASON_LENGTH
            if self.script.hold_first_token_s and not is_last:
                self._spawn(self._publish_later(spec, update))
            else:
                self._publish(spec, update)
        await self._die_if(self.script.die_after == index)
        if not is_last:
            await self._hand_off(held, target)

    async def _publish_later(
        self, spec: types_pb2.RequestSpec, update: worker_pb2.SequenceUpdate
    ) -> None:
        await asyncio.sleep(self.script.hold_first_token_s)
        self._publish(spec, update)

    async def _hand_off(self, held: Held, target: worker_pb2.DecodeTarget) -> None:
        spec = held.spec
        decode = self.network.decode(target)
        index = len(spec.token_ids) - spec.num_prompt_tokens
        attempt = target.decode_attempt
        if decode is None or not decode.accept(spec, attempt):
            retry_after_s = None if decode is None else 0.02
            for one in samples_of(spec):
                self._publish(spec, tell_refused(one, index + 1, attempt, retry_after_s))
            return
        self.held.pop(spec.request_id, None)
        for one in samples_of(spec):
            update = tell_handed_off(spec, one, index + 1, attempt)
            if self.script.hold_first_token_s:
                self._spawn(self._publish_later(spec, update))
            else:
                self._publish(spec, update)

    def accept(self, spec: types_pb2.RequestSpec, decode_attempt: int) -> bool:
        """Takes a hand-off over, as Reserve and Commit in one."""
        if self.script.refuse_reservations > 0:
            self.script.refuse_reservations -= 1
            return False
        if self.fenced.get(spec.request_id, 0) >= spec.attempt or self.script.is_draining:
            return False
        landed = types_pb2.RequestSpec()
        landed.CopyFrom(spec)
        self._drop(spec.request_id)
        self._start_samples(Held(landed, decode_attempt), has_token=True)
        return True

    def _start_samples(self, group: Held, *, has_token: bool = False) -> None:
        for one in samples_of(group.spec):
            if self.fenced.get(one.request_id, 0) >= one.attempt:
                continue
            if has_token:
                one.token_ids.append(next_token(one.token_ids, one.sample_index))
            self._drop(one.request_id)
            held = self.held[one.request_id] = Held(one, group.decode_attempt)
            held.task = self._spawn(self._decode(held))

    async def _decode(self, held: Held) -> None:
        spec = held.spec
        history = list(spec.token_ids)
        index = len(history) - spec.num_prompt_tokens
        while index < spec.sampling.max_tokens:
            await asyncio.sleep(self.script.token_delay_s)
            if not await self._survive(index, held):
                return
            token = next_token(history, spec.sample_index)
            history.append(token)
            update = make_update(held, index, [token])
            if index + 1 >= spec.sampling.max_tokens:
                update.finished.reason = types_pb2.FINISH_REASON_LENGTH
                self.held.pop(spec.request_id, None)
            self._publish(spec, update)
            await self._die_if(self.script.die_after == index)
            index += 1

    async def _survive(self, index: int, held: Held) -> bool:
        """Plays the faults that are due before a token; False ends the request here."""
        script = self.script
        await self._die_if(script.die_before == index)
        if script.freeze_before == index:
            self.is_frozen = True
        if self.is_frozen or not self.is_alive:
            return False
        if script.break_stream_before == index:
            script.break_stream_before = None
            self.break_streams()
        update = tell_scripted_end(script, held, index)
        if update is None:
            return True
        self.held.pop(held.spec.request_id, None)
        self._publish(held.spec, update)
        return False

    async def _die_if(self, is_due: bool) -> None:
        if is_due:
            # Lets what was published reach the stream.
            for _ in range(20):
                await asyncio.sleep(0)
            await self.die()
            raise asyncio.CancelledError

    def _publish(self, spec: types_pb2.RequestSpec, update: worker_pb2.SequenceUpdate) -> None:
        self._streams.publish(FrontId(spec.front_id), update)

    def _drop(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
