"""Requests in flight: worker updates in, tokens and one terminal event out.

The reader of worker streams calls in here and never waits. What needs a peer's answer (placing,
submitting, cancelling) is done by one driver task per request, see `recovery`.
"""

import asyncio
import logging
from dataclasses import replace

from pdserve.detokenizer import TokenTable
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    Overloaded,
    PdserveError,
)
from pdserve.request import HandoffId, Request, RequestId
from pdserve.rpc.v1 import inference_pb2, worker_pb2
from pdserve.timeline import Clock
from router.active import ActiveRequest, ClientCall
from router.admission import Admission
from router.attempt import Phase
from router.client_buffer import make_buffer
from router.emitter import Emitter
from router.endings import Endings
from router.explain import RUNNING, Explanation, choose_latest
from router.in_flight import InFlight
from router.metrics import RouterMetrics
from router.output import Output
from router.placer import Placer
from router.prefix_index import hash_granules
from router.recovery import Limits, Recovery
from router.request_state import RequestState
from router.slo import NO_SLO, Slo
from router.timing import RequestTimes
from router.traffic import TrafficMeter
from router.worker_key import WorkerKey
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


class Dispatcher:
    """Owns every request between admission and its terminal event."""

    def __init__(
        self,
        pool: WorkerPool,
        placer: Placer,
        admission: Admission,
        clock: Clock,
        limits: Limits,
        table: TokenTable,
        metrics: RouterMetrics,
    ) -> None:
        """Listens to the pool from now on."""
        self._pool = pool
        self._placer = placer
        self.admission = admission
        self._clock = clock
        self._limits = limits
        self._table = table
        self._metrics = metrics
        self._in_flight = InFlight()
        self._emitter = Emitter(metrics)
        self._recovery = Recovery(pool, placer, admission, clock, limits, metrics)
        self._endings = Endings(self._in_flight, self._recovery, placer, admission, clock, metrics)
        pool.listen(self)

    @property
    def num_in_flight(self) -> int:
        """Requests without their terminal event."""
        return len(self._in_flight.calls)

    @property
    def traffic(self) -> TrafficMeter:
        """What has come to this front."""
        return self._endings.traffic

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were streamed to clients since the start."""
        return self._metrics.tokens.num_tokens

    def calls(self) -> tuple[ClientCall, ...]:
        """Returns all requests in flight, oldest first."""
        return tuple(self._in_flight.calls.values())

    def start(
        self,
        request: Request,
        handoff_id: HandoffId,
        received_s: float | None = None,
        tenant: str = "",
        http_request_id: str | None = None,
        echo: inference_pb2.PromptChunk | None = None,
        slo: Slo = NO_SLO,
    ) -> ActiveRequest:
        """Admits a checked request and begins to place it.

        Args:
            request: the first attempt's request; its deadline counts from now.
            handoff_id: names its hand-offs.
            received_s: when the client's message came; now, when None.
            tenant: on whose behalf; nobody else may abort it.
            http_request_id: the client's own name for it, for the log.
            echo: the prompt, if the client wants it back.
            slo: what it wants.

        Raises:
            Overloaded: a limit is reached.
            InvalidField: a request of this id is in flight.
        """
        if request.request_id in self._in_flight.calls:
            raise InvalidField("request_id", request.request_id, "unique among those in flight")
        self.admission.admit()
        self.traffic.note_arrival(request.num_prompt_tokens)
        now_s = self._clock.now()
        deadline_s = request.deadline_s
        call = ClientCall(
            request=request,
            handoff_id=handoff_id,
            received_s=now_s if received_s is None else received_s,
            buffer=make_buffer(request, self._limits.max_client_buffer_bytes, echo),
            granules=hash_granules(request.token_ids, request.tenant_salt),
            deadline_at_s=None if deadline_s is None else now_s + deadline_s,
            tenant=tenant,
            slo=slo,
            http_request_id=http_request_id,
        )
        self._in_flight.add(call)
        for one in replace(request, handoff_id=handoff_id).samples():
            self._add_sample(call, one)
        call.together = list(call.samples)
        call.waiting.add(call.samples[0])
        if deadline_s is not None:
            call.deadline_timer = asyncio.get_running_loop().call_later(
                deadline_s,
                self._endings.end_call,
                call,
                DeadlineExceeded(f"the deadline of {deadline_s:.3g} s passed"),
            )
        return call.samples[0]

    def _add_sample(self, call: ClientCall, one: Request) -> None:
        if one.sample_index:
            # The first sample speaks for the prompt that they share.
            one = replace(one, sampling=replace(one.sampling, prompt_logprobs=None))
        active = ActiveRequest(
            call=call,
            state=RequestState(one, one.handoff_id, self._limits.max_attempts),
            output=Output(self._table, one.sampling, one.sample_index),
            times=RequestTimes(call.received_s),
        )
        call.samples.append(active)
        self._in_flight.samples[one.request_id] = active
        active.driver = asyncio.create_task(self._drive(active), name=f"request-{one.request_id}")

    def cancel(self, active: ActiveRequest) -> None:
        """Ends a request whose client is gone; nothing happens when it has ended."""
        self._endings.end_call(active.call, Cancelled("the client cancelled the request"))

    def abort(self, request_id: RequestId, tenant: str = "") -> bool:
        """Ends a tenant's request by its id; False when the tenant has none of this id."""
        call = self._in_flight.calls.get(request_id)
        if call is None or call.tenant != tenant:
            return False
        self._endings.end_call(call, Cancelled("the request was aborted"))
        return True

    def explain(self, request_id: RequestId, tenant: str = "") -> Explanation:
        """Tells why a tenant's request went where it went.

        Args:
            request_id: its own, or else the X-Request-Id of the HTTP call that it came by; of
                several, the latest is explained.
            tenant: whose it must be.

        Raises:
            RequestNotFound: the tenant has none of this id in flight, or among the last ended.
        """
        running, ended = self._in_flight.calls, self._endings.explained
        call = running.get(request_id)
        if call is not None and call.tenant == tenant:
            return call.explain(RUNNING)
        found = ended.find(request_id, tenant)
        if found is not None:
            return found
        alike = [
            one.explain(RUNNING)
            for one in running.values()
            if one.http_request_id == request_id and one.tenant == tenant
        ]
        return choose_latest([*ended.of_http_call(request_id, tenant), *alike])

    def end_all(self, error: PdserveError) -> None:
        """Ends what is in flight, at shutdown."""
        for call in list(self._in_flight.calls.values()):
            self._endings.end_call(call, error)

    async def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        await self._in_flight.wait_idle()

    async def settle(self, timeout_s: float) -> None:
        """Waits until the cancels that were sent are answered, or the time is over."""
        await self._recovery.settle(timeout_s)

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Takes one iteration's updates of a worker."""
        # What one message carries came at one time.
        now_s = self._clock.now()
        for update in batch.updates:
            active = self._in_flight.samples.get(update.request_id)
            if active is None:
                self._refuse_stale(worker, update)
                continue
            try:
                token_id = active.state.take_next(worker, update)
                if token_id is not None:
                    if not self._emitter.emit_next(active, token_id, now_s):
                        self._cut(active)
                    elif active.state.is_ended:
                        self._follow(active)
                elif active.state.is_current(worker, update):
                    self._apply(active, worker, update, now_s)
                else:
                    self._refuse_stale(worker, update)
            except Exception:
                # One request's defect must not end the stream that carries all the others.
                logger.exception("update failed", extra={"request_id": update.request_id})
                self._endings.end(active, InternalError("the router failed on a worker's update"))

    def on_worker_lost(self, worker: WorkerKey, why: str) -> None:
        """Sends the requests of a dead worker to recovery."""
        self._placer.forget(worker)
        self._metrics.workers_lost.inc()
        for active in list(self._in_flight.samples.values()):
            if active.state.is_ended:
                self._endings.end(active, None)
            elif active.state.speaks_for(worker):
                active.state.lose_worker(worker)
                self._follow(active)

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        """Returns where each request of a worker stands."""
        return [
            worker_pb2.Resume(
                request_id=active.state.request_id,
                attempt=active.state.attempt,
                next_index=active.state.next_index,
                next_prompt_position=active.state.next_prompt_position,
            )
            for active in self._in_flight.samples.values()
            if active.state.speaks_for(worker)
        ]

    def _apply(
        self,
        active: ActiveRequest,
        worker: WorkerKey,
        update: worker_pb2.SequenceUpdate,
        now_s: float,
    ) -> None:
        state = active.state
        phase = state.phase
        piece = state.take_prompt(worker, update)
        if piece is not None:
            self._emit_prompt(active, piece)
        if update.token_ids:
            self._placer.finish_prefill(state.request_id, worker)
        tokens = state.apply(worker, update)
        if update.HasField("times"):
            active.times.note_stages(update.attempt, update.times)
        has_news = bool(tokens) or state.finish is not None
        if has_news and not self._emitter.emit(active, tokens, now_s):
            self._cut(active)
        if state.phase is not phase or update.WhichOneof("outcome") is not None:
            self._follow(active)

    def _emit_prompt(self, active: ActiveRequest, piece: worker_pb2.PromptLogprobs) -> None:
        active.buffer.push_prompt(
            inference_pb2.PromptChunk(first_position=piece.first_position, logprobs=piece.logprobs)
        )
        if active.state.is_prompt_scored:
            active.buffer.open_output()

    def _cut(self, active: ActiveRequest) -> None:
        limit = self._limits.max_client_buffer_bytes
        self._metrics.slow_readers.inc()
        self._endings.end(
            active, Overloaded(f"the client reads too slowly: over {limit} bytes wait")
        )

    def _follow(self, active: ActiveRequest) -> None:
        """Does at once what a change of state asks for; the driver does what takes time."""
        state = active.state
        self._recovery.send_fences(state)
        self._placer.keep_only(state.request_id, state.holders())
        if state.is_ended:
            if state.awaits_prefill:
                self._endings.end_later(active, self._limits.linger_s)
            else:
                self._endings.end(active, None)
        elif state.phase in (Phase.WAITING, Phase.UNPLACED):
            active.moved.set()
            active.call.wake()

    def _take_late(
        self, active: ActiveRequest, worker: WorkerKey, update: worker_pb2.SequenceUpdate
    ) -> None:
        state = active.state
        assert state.placement is not None
        if worker != state.placement.prefill or update.attempt != state.attempt:
            return
        if update.HasField("times"):
            active.times.note_stages(update.attempt, update.times)
        if update.WhichOneof("outcome") is not None:
            self._endings.end(active, None)

    async def _drive(self, active: ActiveRequest) -> None:
        state = active.state
        try:
            while not state.is_ended:
                if state.phase is Phase.WAITING and not active.call.is_untouched:
                    active.call.part(active)
                if state.phase is Phase.WAITING and active.is_leader:
                    await self._recovery.begin_attempt(active)
                elif state.phase is Phase.UNPLACED and active.is_leader:
                    await self._recovery.place_decode(active)
                else:
                    await active.moved.wait()
                    active.moved.clear()
                    if active.fatal_refusal is not None:
                        raise active.fatal_refusal
        except PdserveError as error:
            self._endings.end(active, error)
        except Exception:
            logger.exception("request failed", extra={"request_id": state.request_id})
            self._endings.end(active, InternalError("the router failed on this request"))

    def _refuse_stale(self, worker: WorkerKey, update: worker_pb2.SequenceUpdate) -> None:
        active = self._in_flight.samples.get(update.request_id)
        if active is not None and active.state.is_ended:
            self._take_late(active, worker, update)
            return
        self._metrics.stale_updates.inc()
        is_running_on = bool(update.token_ids) and update.WhichOneof("outcome") is None
        is_newest = active is not None and update.attempt >= active.state.attempt
        if is_running_on and not is_newest:
            self._recovery.send_cancel(worker, RequestId(update.request_id), update.attempt)
