"""One worker as this front sees it: a channel, a token stream that resumes, and calls.

    connecting -> alive -> (stream broken -> alive)* -> lost

A broken stream is no death: the link resumes where it was. It is lost when nobody listens at the
address, when another incarnation answers, or when nothing was heard for `worker_silence_s`.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import grpc

from pdserve.errors import WorkerLost
from pdserve.registry.base import WorkerRecord
from pdserve.request import FrontId, RequestId
from pdserve.rpc.server import open_channel
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import inference_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from pdserve.timeline import Clock
from router.worker_key import WorkerKey

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_RECONNECT_PAUSE_S = 0.05
_MAX_RECONNECT_PAUSE_S = 0.5


class LinkListener(Protocol):
    """Who is told of a link's life. All calls are made on the event loop and must not block."""

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Takes a message of the stream."""
        ...

    def on_link_changed(self, worker: WorkerKey) -> None:
        """Takes note that a worker became available, or began to drain."""
        ...

    def on_link_lost(self, worker: WorkerKey, why: str) -> None:
        """Takes note of a death; said once per link."""
        ...

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        """Returns what a new stream must resume."""
        ...


class WorkerLink:
    """Owns the channel to one life of one worker."""

    def __init__(
        self,
        record: WorkerRecord,
        front_id: FrontId,
        listener: LinkListener,
        clock: Clock,
        *,
        max_message_bytes: int,
        learns: bool,
    ) -> None:
        """Opens a channel; `start` begins the stream.

        Args:
            record: the worker's.
            front_id: what it knows this process by.
            listener: is told what it says.
            clock: of silence.
            max_message_bytes: of one message.
            learns: somebody here wants to know what the worker's steps took before.
        """
        self.record = record
        self.key = WorkerKey(worker_id=record.worker_id, incarnation=record.incarnation)
        self.load: types_pb2.WorkerLoad | None = None
        self.last_report: int | None = None
        """Number of the last load report that was taken in."""
        self.is_alive = False
        self.is_lost = False
        self._front_id = front_id
        self._learns = learns
        self._listener = listener
        self._clock = clock
        self._says_draining = False
        self.is_flipping = False
        """It said that it leaves to come back in the other pool."""
        self._channel = open_channel(record.address, max_message_bytes=max_message_bytes)
        self._stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self._channel)
        self._last_heard_s = clock.now()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_draining(self) -> bool:
        """It takes no new work."""
        return self._says_draining or self.record.state == "draining"

    @property
    def is_available(self) -> bool:
        """New work may go there now."""
        return self.is_alive and not self.is_lost and not self.is_draining

    def start(self) -> None:
        """Begins to read the stream."""
        self._task = asyncio.create_task(self._run(), name=f"stream-{self.key.worker_id}")

    def silence_s(self) -> float:
        """Seconds since the stream said anything."""
        return self._clock.now() - self._last_heard_s

    def lose(self, why: str) -> None:
        """Declares the worker dead to this router."""
        if self.is_lost:
            return
        self.is_lost = True
        was_alive, self.is_alive = self.is_alive, False
        if was_alive:
            # One that had said it drains was told to leave, or to change its role.
            level, words = (
                (logging.INFO, "worker left")
                if self.is_draining
                else (logging.WARNING, "worker lost")
            )
            logger.log(level, words, extra={"worker_id": self.key.worker_id, "why": why})
        self._listener.on_link_lost(self.key, why)

    async def close(self) -> None:
        """Ends the stream and the channel."""
        self.is_lost = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._channel.close()

    async def submit(self, request: worker_pb2.SubmitRequest, timeout_s: float) -> None:
        """Sends a request; raises the worker's error, or WorkerLost when it is not reached."""
        self._check_usable()
        await self._answer(self._stub.Submit(request, timeout=timeout_s))

    async def place_decode(self, request: worker_pb2.PlaceDecodeRequest, timeout_s: float) -> None:
        """Names a decode worker for held KV; raises as `submit` does."""
        self._check_usable()
        await self._answer(self._stub.PlaceDecode(request, timeout=timeout_s))

    async def cancel(self, request_id: RequestId, attempt: int, timeout_s: float) -> bool:
        """Fences an attempt and all older ones; returns whether the worker knew the request."""
        self._check_usable()
        request = worker_pb2.CancelRequest(request_id=request_id, attempt=attempt)
        answer = await self._answer(self._stub.Cancel(request, timeout=timeout_s))
        return answer.was_known

    async def get_status(
        self, timeout_s: float, seen: types_pb2.SeenReport | None = None
    ) -> inference_pb2.WorkerInfo:
        """Asks for figures and the ledger, and samples since a report; raises as `submit` does."""
        self._check_usable()
        request = worker_pb2.GetStatusRequest(seen=seen)
        call = self._stub.GetStatus(request, timeout=timeout_s)
        return (await self._answer(call)).worker

    def watch_cache(
        self, request: worker_pb2.WatchCacheRequest
    ) -> grpc.aio.UnaryStreamCall[worker_pb2.WatchCacheRequest, worker_pb2.CacheBatch]:
        """Opens a stream of what the worker caches; whoever reads it cancels it."""
        return self._stub.WatchCache(request)

    def _check_usable(self) -> None:
        if self.is_lost:
            raise WorkerLost(f"worker {self.key.worker_id} is gone")

    async def _answer(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            # A closed channel cancels its calls, and grpc.aio passes that on to whoever waits: an
            # RPC handler that waits would end without a status, and its client would hang.
            task = asyncio.current_task()
            if self.is_lost and task is not None and not task.cancelling():
                raise WorkerLost(f"worker {self.key.worker_id} is gone") from None
            raise

    async def _run(self) -> None:
        pause_s = _RECONNECT_PAUSE_S
        while not self.is_lost:
            num_heard = await self._read_stream()
            if self.is_lost:
                return
            if await self._is_refused():
                self.lose("connection refused")
                return
            pause_s = _RECONNECT_PAUSE_S if num_heard else min(2 * pause_s, _MAX_RECONNECT_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _read_stream(self) -> int:
        """Reads one stream until it breaks; returns the number of messages."""
        num_heard = 0
        resumes = self._listener.resumes_for(self.key)
        asked = worker_pb2.StreamRequest(
            front_id=self._front_id,
            resumes=resumes,
            wants_past_samples=self._learns and self.last_report is None,
        )
        call = self._stub.Stream(asked)
        try:
            async for batch in call:
                num_heard += 1
                self._take_batch(batch)
                if self.is_lost:
                    break
        except grpc.aio.AioRpcError as error:
            if num_heard:
                logger.info(
                    "worker stream broke",
                    extra={"worker_id": self.key.worker_id, "why": error.details()},
                )
        finally:
            call.cancel()
        return num_heard

    def _take_batch(self, batch: worker_pb2.StreamBatch) -> None:
        if batch.incarnation != self.key.incarnation:
            self.lose("another incarnation answers")
            return
        self._last_heard_s = self._clock.now()
        is_changed = not self.is_alive or batch.is_draining != self._says_draining
        self.is_alive = True
        self._says_draining = batch.is_draining
        self.is_flipping = batch.is_flipping
        if batch.HasField("load"):
            self.load = batch.load
        if is_changed:
            self._listener.on_link_changed(self.key)
        self._listener.on_batch(self.key, batch)

    async def _is_refused(self) -> bool:
        """Says whether nobody listens any more; a full backlog or a lost packet is no proof."""
        host, _, port = self.record.address.rpartition(":")
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False
