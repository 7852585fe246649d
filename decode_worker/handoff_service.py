"""The Handoff service of a decode worker's face: hands every call to the rank."""

import logging

import grpc

from pdserve.errors import PdserveError
from pdserve.face.rank_process import RankProcess
from pdserve.rpc.codec import ids_for_log
from pdserve.rpc.status import abort_with
from pdserve.rpc.v1 import handoff_pb2, handoff_pb2_grpc, rank_pb2

logger = logging.getLogger(__name__)


class HandoffService(handoff_pb2_grpc.HandoffServicer):
    """Answers prefill workers."""

    def __init__(self, rank: RankProcess, call_timeout_s: float, land_timeout_s: float) -> None:
        """A commit waits for the last frame, so it has a longer deadline than other calls."""
        self._rank = rank
        self._call_timeout_s = call_timeout_s
        self._land_timeout_s = land_timeout_s

    async def _call(
        self,
        message: rank_pb2.ToRank,
        timeout_s: float,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> rank_pb2.RankReply:
        remaining_s = context.time_remaining()
        if remaining_s is not None:
            timeout_s = min(timeout_s, remaining_s)
        try:
            return await self._rank.call(message, timeout_s)
        except PdserveError as error:
            await abort_with(context, error)
            raise AssertionError("abort returned") from error

    async def Reserve(
        self,
        request: handoff_pb2.ReserveRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> handoff_pb2.ReserveResponse:
        """Grants or refuses blocks."""
        message = rank_pb2.ToRank(reserve=request)
        reply = await self._call(message, self._call_timeout_s, context)
        logger.info("reservation answered", extra=ids_for_log(request.request))
        return reply.reserve

    async def Commit(
        self,
        request: handoff_pb2.CommitRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> handoff_pb2.CommitResponse:
        """Answers once the sequence has landed or was aborted."""
        message = rank_pb2.ToRank(commit=request)
        return (await self._call(message, self._land_timeout_s, context)).commit

    async def Abort(
        self,
        request: handoff_pb2.AbortHandoffRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> handoff_pb2.AbortHandoffResponse:
        """Gives blocks back."""
        message = rank_pb2.ToRank(abort=request)
        return (await self._call(message, self._call_timeout_s, context)).abort

    async def Renew(
        self,
        request: handoff_pb2.RenewRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> handoff_pb2.RenewResponse:
        """Keeps reservations alive."""
        message = rank_pb2.ToRank(renew=request)
        return (await self._call(message, self._call_timeout_s, context)).renew
