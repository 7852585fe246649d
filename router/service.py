"""The Inference service: what clients call."""

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from pdserve.errors import Cancelled, InvalidField, PdserveError, RequestNotFound
from pdserve.request import RequestId, Role
from pdserve.rpc.status import abort_with
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pdserve.trace import parse_traceparent
from router.active import ActiveRequest, ClientCall
from router.auth import authorization_of
from router.dispatch import Dispatcher
from router.front_desk import FrontDesk
from router.intake import Intake, Origin
from router.output import Delta
from router.response import ResponseWriter
from router.tenants import Keyring, Tenant
from router.worker_link import WorkerLink
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

FLIPPING = "flipping"
"""State of a worker on its way to the other pool; it says so itself as long as it can."""
STATUS_TIMEOUT_S = 1.0
"""How long GetLoads waits for each worker's own figures."""
EXPLAIN_KEY = "pdserve-explain"
"""Trailer of a stream that ended well: its critical path in one line."""
ABORT_TIMEOUT_S = 5.0
"""A status is handed to a client that reads nothing for this long, then the call is dropped."""

AnyContext = grpc.aio.ServicerContext[Any, Any]
GenerateContext = grpc.aio.ServicerContext[
    inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerIdentity:
    """What does not change while the front runs."""

    front_id: str
    version: str
    process_name: str
    """Of this front among those of the router."""
    started_at_s: float
    model_info: inference_pb2.GetModelInfoResponse


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients. One handler task per call; streams end with one terminal event."""

    def __init__(
        self,
        intake: Intake,
        pool: WorkerPool,
        identity: ServerIdentity,
        keyring: Keyring,
        desk: FrontDesk,
    ) -> None:
        """Takes the parts of one front."""
        self._intake = intake
        self._dispatcher = intake.dispatcher
        self._pool = pool
        self._identity = identity
        self._keyring = keyring
        self._desk = desk

    # Written with context.write and not as a generator: a write that is stuck at a client that
    # does not read can be interrupted only here, and the status must still be set after it.
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        """Streams one request."""
        try:
            tenant = self._tenant_of(context)
            active = await self._intake.start(
                request, tenant, timeout_s=context.time_remaining(), origin=_origin_of(context)
            )
        except PdserveError as error:
            await abort_with(context, error)
            return
        try:
            await self._stream(active, context)
        finally:
            self._dispatcher.cancel(active)
        ending = active.buffer.ending
        explanation = active.call.explanation
        if explanation is not None:
            context.set_trailing_metadata(((EXPLAIN_KEY, explanation.summary()),))
        if ending is not None and ending.error is not None:
            await _abort_in_time(context, ending.error)

    def _tenant_of(self, context: AnyContext) -> Tenant:
        return self._keyring.authenticate(authorization_of(context.invocation_metadata()))

    async def _stream(self, active: ActiveRequest, context: GenerateContext) -> None:
        """Writes until the end, or until the dispatcher cuts a client that does not read."""
        task = asyncio.current_task()
        assert task is not None
        # By itself: a first write that is interrupted would leave it half sent, and no status could
        # follow (grpcio 1.8x, GRPC_CALL_ERROR_TOO_MANY_OPERATIONS).
        await context.send_initial_metadata(())
        active.buffer.interrupt_with(task.cancel)
        buffer, responses = active.buffer, ResponseWriter(active.call.request_id)
        try:
            while (event := await buffer.take()) is not None:
                if isinstance(event, Delta):
                    await context.write(responses.tokens(event))
                else:
                    await context.write(responses.prompt(event))
            ending = buffer.ending
            if ending is not None and ending.completion is not None:
                await context.write(responses.completion(ending.completion))
        except asyncio.CancelledError:
            ending = active.buffer.ending
            is_cut = ending is not None and ending.error is not None
            if not is_cut or context.cancelled():
                raise
            task.uncancel()
        finally:
            # A second interrupt, by the cancel that follows in Generate, would hit grpc's own code.
            active.buffer.interrupt_with(_do_nothing)

    async def Abort(
        self,
        request: inference_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[inference_pb2.AbortRequest, inference_pb2.AbortResponse],
    ) -> inference_pb2.AbortResponse:
        """Ends a request by its id; an unknown or ended one is no error while no keys are set.

        With keys, an unknown id and another tenant's are the same: NOT_FOUND.
        """
        if not request.request_id:
            await abort_with(context, InvalidField("request_id", "", "the id of a request"))
        try:
            tenant = self._tenant_of(context)
            was_found = await self._desk.abort(RequestId(request.request_id), tenant.name)
        except PdserveError as error:
            await abort_with(context, error)
            raise
        if not was_found and not self._keyring.is_open:
            await abort_with(context, RequestNotFound("no request of this id is in flight"))
        return inference_pb2.AbortResponse()

    async def Explain(
        self,
        request: inference_pb2.ExplainRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.ExplainRequest, inference_pb2.ExplainResponse
        ],
    ) -> inference_pb2.ExplainResponse:
        """Tells why one of the caller's requests went where it went."""
        try:
            tenant = self._tenant_of(context)
            return await self._desk.explain(RequestId(request.request_id), tenant.name)
        except PdserveError as error:
            await abort_with(context, error)
            raise

    async def GetModelInfo(
        self,
        request: inference_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse
        ],
    ) -> inference_pb2.GetModelInfoResponse:
        """Describes the served model and its effective limits."""
        info = inference_pb2.GetModelInfoResponse()
        info.CopyFrom(self._identity.model_info)
        info.dtype = self._pool.dtype
        held_tokens = self._pool.max_model_len
        if held_tokens is not None:
            info.max_model_len = min(info.max_model_len, held_tokens)
        return info

    async def GetServerInfo(
        self,
        request: inference_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetServerInfoRequest, inference_pb2.GetServerInfoResponse
        ],
    ) -> inference_pb2.GetServerInfoResponse:
        """Describes all fronts of this port and the pools that they can use now."""
        try:
            return await self._desk.info(accepts_partial=request.accepts_partial)
        except PdserveError as error:
            await abort_with(context, error)
            raise

    async def GetLoads(
        self,
        request: inference_pb2.GetLoadsRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetLoadsRequest, inference_pb2.GetLoadsResponse
        ],
    ) -> inference_pb2.GetLoadsResponse:
        """Asks every worker for its figures; one that does not answer is described from memory.

        One that is on its way to the other pool, or died a while ago and may be restarting, is
        there without figures.
        """
        # Before anybody is waited for: one that comes back meanwhile must not be missing.
        departed = self._pool.departed()
        infos = await asyncio.gather(
            *(_worker_info(link, _seen_of(request, link)) for link in self._pool.links())
        )
        shown = {info.worker_id for info in infos}
        gone = [
            inference_pb2.WorkerInfo(
                worker_id=one.record.worker_id,
                role=one.record.role,
                state=FLIPPING if one.is_flipping else "gone",
            )
            for one in departed
            if one.record.worker_id not in shown
        ]
        return inference_pb2.GetLoadsResponse(workers=[*infos, *gone])


def describe_front(
    identity: ServerIdentity, dispatcher: Dispatcher, pool: WorkerPool, state: str, now_s: float
) -> inference_pb2.GetServerInfoResponse:
    """Describes one front and the pools that it can use now."""
    calls, traffic = dispatcher.calls(), dispatcher.traffic
    load = dispatcher.admission.load
    process = inference_pb2.RouterProcess(
        name=identity.process_name,
        pid=os.getpid(),
        state=state,
        uptime_s=now_s - identity.started_at_s,
        requests_in_flight=load.num_in_flight,
        requests_queued=load.num_waiting,
    )
    return inference_pb2.GetServerInfoResponse(
        version=identity.version,
        front_id=identity.front_id,
        uptime_s=now_s - identity.started_at_s,
        num_prefill=pool.num_available(Role.PREFILL),
        num_decode=pool.num_available(Role.DECODE),
        requests_in_flight=dispatcher.num_in_flight,
        requests_queued=dispatcher.admission.num_waiting,
        requests_arrived=traffic.num_arrived,
        prompt_tokens=traffic.uncached_tokens,
        output_tokens=dispatcher.num_output_tokens,
        waiting_tokens=sum(c.request.num_prompt_tokens for c in calls if c.waiting),
        oldest_wait_s=now_s - min(_waiting_since(calls, pool.links()), default=now_s),
        num_fronts=1,
        processes=[process],
    )


def _waiting_since(calls: Iterable[ClientCall], links: Iterable[WorkerLink]) -> Iterator[float]:
    """Yields when each request was received that waits for others.

    It has no token, and no worker says that it computes the prompt: whoever is not heard of, or
    computes something else, hides no queue.
    """
    computing = {name for link in links if link.load is not None for name in link.load.computing}
    for call in calls:
        is_told = any(one.times.first_token_s is not None for one in call.samples)
        if not is_told and computing.isdisjoint(one.wire_id for one in call.samples):
            yield call.received_s


def _origin_of(context: AnyContext) -> Origin:
    values = [
        value if isinstance(value, str) else value.decode("latin-1")
        for name, value in context.invocation_metadata() or ()
        if name == "traceparent"
    ]
    return Origin(trace_id=parse_traceparent(values))


def _seen_of(
    request: inference_pb2.GetLoadsRequest, link: WorkerLink
) -> types_pb2.SeenReport | None:
    """Returns which report of a worker a caller had last; None if it wants no earlier ones."""
    if not request.wants_past_samples:
        return None
    name = link.key.worker_id
    return request.seen[name] if name in request.seen else types_pb2.SeenReport()


async def _worker_info(
    link: WorkerLink, seen: types_pb2.SeenReport | None
) -> inference_pb2.WorkerInfo:
    try:
        info = await link.get_status(STATUS_TIMEOUT_S, seen)
    except PdserveError as error:
        record = link.record
        state = FLIPPING if link.is_flipping else "lost" if link.is_lost else "silent"
        logger.info("no status", extra={"worker_id": record.worker_id, "reason": error.reason})
        info = inference_pb2.WorkerInfo(
            worker_id=record.worker_id,
            role=record.role,
            incarnation=record.incarnation,
            state=state,
            face_pid=record.face_pid,
            rank_pids=record.rank_pids,
            load=link.load,
        )
        if info.HasField("load"):
            # No report: what it measured is told once it answers.
            info.load.ClearField("report")
            info.load.ClearField("samples")
    info.address = link.record.address
    return info


async def _abort_in_time(context: GenerateContext, error: PdserveError) -> None:
    if isinstance(error, Cancelled) and context.cancelled():
        return
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await abort_with(context, error)
    except TimeoutError:
        logger.info("status not taken by the client", extra={"reason": error.reason})


def _do_nothing() -> None:
    """The handler writes no more: nothing is left to interrupt."""
