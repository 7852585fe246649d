"""The Worker service: hands calls to the rank, and serves token streams."""

import logging
from collections.abc import AsyncIterator, Callable

import grpc

from pdserve.errors import PdserveError, StaleAttempt, WorkerLost
from pdserve.face.cache_streams import CacheStreams
from pdserve.face.rank_process import RankProcess
from pdserve.face.streams import FrontStreams
from pdserve.face.token_log import TokenLog
from pdserve.request import FrontId, Incarnation, RequestId
from pdserve.rpc.codec import ids_for_log, request_from_wire
from pdserve.rpc.status import abort_with
from pdserve.rpc.v1 import inference_pb2, rank_pb2, types_pb2, worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)


class LiveInfo:
    """What a face says of its worker: who and how it is, and what its rank said last.

    Apart, and a heartbeat replaced as a whole: whatever is copied into a message (upb 7.x) stays
    in its memory for as long as it lives, 0.5 KB for each report of a worker's load.
    """

    def __init__(self, identity: inference_pb2.WorkerInfo) -> None:
        """No heartbeat has come."""
        self.identity = identity
        self.heartbeat = rank_pb2.RankHeartbeat()

    def describe(self) -> inference_pb2.WorkerInfo:
        """Returns all of it in a message of its own."""
        info = inference_pb2.WorkerInfo()
        info.CopyFrom(self.identity)
        info.load.CopyFrom(self.heartbeat.load)
        info.ledger.CopyFrom(self.heartbeat.ledger)
        info.links.extend(self.heartbeat.links)
        return info


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers routers."""

    def __init__(
        self,
        rank: RankProcess,
        streams: FrontStreams,
        cache: CacheStreams,
        log: TokenLog,
        live: LiveInfo,
        patience_s: Callable[[], float],
    ) -> None:
        """`live` is kept up to date by the face.

        Args:
            rank: rank 0, which answers between its steps.
            streams: what routers listen to.
            cache: likewise.
            log: tokens that routers have not taken.
            live: what is to be said of this worker.
            patience_s: how long a rank may be at one step now; longer means frozen.
        """
        self._rank = rank
        self._streams = streams
        self._cache = cache
        self._log = log
        self._live = live
        self._info = live.identity
        self._patience_s = patience_s

    async def Submit(
        self,
        request: worker_pb2.SubmitRequest,
        context: grpc.aio.ServicerContext[worker_pb2.SubmitRequest, worker_pb2.SubmitResponse],
    ) -> worker_pb2.SubmitResponse:
        """Queues a request on the rank."""
        spec = request.request
        sample_ids = _sample_ids(spec)
        try:
            if request.incarnation != self._info.incarnation:
                raise StaleAttempt(f"this is incarnation {self._info.incarnation:016x}")
            if self._info.state != "ready":
                raise WorkerLost(f"worker {self._info.worker_id} is {self._info.state}")
            for sample_id in sample_ids:
                self._log.open(FrontId(spec.front_id), sample_id, spec.attempt)
            reply = await self._rank.call(rank_pb2.ToRank(submit=request), self._patience_s())
            logger.info("request taken", extra=ids_for_log(spec))
        except PdserveError as error:
            for sample_id in sample_ids:
                self._log.forget(sample_id, spec.attempt)
            await abort_with(context, error)
        return reply.submit

    async def PlaceDecode(
        self,
        request: worker_pb2.PlaceDecodeRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.PlaceDecodeRequest, worker_pb2.PlaceDecodeResponse
        ],
    ) -> worker_pb2.PlaceDecodeResponse:
        """Names another decode worker for a request this rank holds."""
        try:
            message = rank_pb2.ToRank(place_decode=request)
            reply = await self._rank.call(message, self._patience_s())
        except PdserveError as error:
            await abort_with(context, error)
        return reply.place_decode

    async def Cancel(
        self,
        request: worker_pb2.CancelRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CancelRequest, worker_pb2.CancelResponse],
    ) -> worker_pb2.CancelResponse:
        """Frees everything of a request here."""
        try:
            reply = await self._rank.call(rank_pb2.ToRank(cancel=request), self._patience_s())
        except PdserveError as error:
            await abort_with(context, error)
        self._log.forget(RequestId(request.request_id), request.attempt)
        return reply.cancel

    async def Stream(
        self,
        request: worker_pb2.StreamRequest,
        context: grpc.aio.ServicerContext[worker_pb2.StreamRequest, worker_pb2.StreamBatch],
    ) -> AsyncIterator[worker_pb2.StreamBatch]:
        """Streams what the front does not have yet."""
        async for batch in self._streams.serve(request):
            yield batch

    async def WatchCache(
        self,
        request: worker_pb2.WatchCacheRequest,
        context: grpc.aio.ServicerContext[worker_pb2.WatchCacheRequest, worker_pb2.CacheBatch],
    ) -> AsyncIterator[worker_pb2.CacheBatch]:
        """Streams what the prefix cache holds."""
        async for batch in self._cache.serve(request):
            yield batch

    async def GetStatus(
        self,
        request: worker_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.GetStatusRequest, worker_pb2.GetStatusResponse
        ],
    ) -> worker_pb2.GetStatusResponse:
        """Returns identity, load, ledger and links as of the last heartbeat."""
        worker = self._live.describe()
        if request.HasField("seen"):
            # Of another life nothing counts as seen.
            is_ours = request.seen.incarnation == worker.incarnation
            self._streams.fill_in(worker.load, request.seen.report if is_ours else 0)
        return worker_pb2.GetStatusResponse(worker=worker)


def _sample_ids(spec: types_pb2.RequestSpec) -> tuple[RequestId, ...]:
    request = request_from_wire(spec)
    return tuple(sample.request_id for sample in request.samples())


def new_worker_info(
    worker_id: str, role: str, incarnation: Incarnation, face_pid: int
) -> inference_pb2.WorkerInfo:
    """Returns the record that a face keeps up to date."""
    return inference_pb2.WorkerInfo(
        worker_id=worker_id,
        role=role,
        incarnation=incarnation,
        face_pid=face_pid,
        state="starting",
    )
