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
from router.client_buffer import Ending, make_buffer
from router.emitter import Emitter
from router.explain import ExplainLog, Explanation
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
        self._calls: dict[RequestId, ClientCall] = {}
        self._active: dict[str, ActiveRequest] = {}
        """Samples, by the ids under which workers speak of them."""
        self.traffic = TrafficMeter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._emitter = Emitter(metrics)
        self._explained = ExplainLog()
        self._recovery = Recovery(pool, placer, admission, clock, limits, metrics)
        pool.listen(self)

    @property
    def num_in_flight(self) -> int:
        """Requests without their terminal event."""
        return len(self._calls)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were streamed to clients since the start."""
        return self._metrics.tokens.num_tokens

    def calls(self) -> tuple[ClientCall, ...]:
        """Returns all requests in flight, oldest first."""
        return tuple(self._calls.values())

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
        if request.request_id in self._calls:
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
        self._calls[request.request_id] = call
        self._idle.clear()
        for one in replace(request, handoff_id=handoff_id).samples():
            self._add_sample(call, one)
        call.together = list(call.samples)
        call.waiting.add(call.samples[0])
        if deadline_s is not None:
            call.deadline_timer = asyncio.get_running_loop().call_later(
                deadline_s,
                self._end_call,
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
        self._active[one.request_id] = active
        active.driver = asyncio.create_task(self._drive(active), name=f"request-{one.request_id}")

    def cancel(self, active: ActiveRequest) -> None:
        """Ends a request whose client is gone; nothing happens when it has ended."""
        self._end_call(active.call, Cancelled("the client cancelled the request"))

    def abort(self, request_id: RequestId, tenant: str = "") -> bool:
        """Ends a tenant's request by its id; False when the tenant has none of this id."""
        call = self._calls.get(request_id)
        if call is None or call.tenant != tenant:
            return False
        self._end_call(call, Cancelled("the request was aborted"))
        return True

    def explain(self, request_id: RequestId, tenant: str = "") -> Explanation:
        """Tells why a tenant's request went where it went.

        Raises:
            RequestNotFound: the tenant has none of this id in flight, or among the last ended.
        """
        call = self._calls.get(request_id)
        if call is not None and call.tenant == tenant:
            return call.explain("running")
        return self._explained.find(request_id, tenant)

    def end_all(self, error: PdserveError) -> None:
        """Ends what is in flight, at shutdown."""
        for call in list(self._calls.values()):
            self._end_call(call, error)

    async def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    async def settle(self, timeout_s: float) -> None:
        """Waits until the cancels that were sent are answered, or the time is over."""
        await self._recovery.settle(timeout_s)

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Takes one iteration's updates of a worker."""
        # What one message carries came at one time.
        now_s = self._clock.now()
        for update in batch.updates:
            active = self._active.get(update.request_id)
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
                self.end(active, InternalError("the router failed on a worker's update"))

    def on_worker_lost(self, worker: WorkerKey, why: str) -> None:
        """Sends the requests of a dead worker to recovery."""
        self._placer.forget(worker)
        self._metrics.workers_lost.inc()
        for active in list(self._active.values()):
            if active.state.is_ended:
                self.end(active, None)
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
            for active in self._active.values()
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
        self.end(active, Overloaded(f"the client reads too slowly: over {limit} bytes wait"))

    def _follow(self, active: ActiveRequest) -> None:
        """Does at once what a change of state asks for; the driver does what takes time."""
        state = active.state
        self._recovery.send_fences(state)
        self._placer.keep_only(state.request_id, state.holders())
        if state.is_ended:
            if state.awaits_prefill:
                self._linger(active)
            else:
                self.end(active, None)
        elif state.phase in (Phase.WAITING, Phase.UNPLACED):
            active.moved.set()
            active.call.wake()

    def _linger(self, active: ActiveRequest) -> None:
        """Keeps the completion back for the prefill worker's times, which are on their way.

        The client has all its tokens; decode was quicker than the acknowledgement to prefill.
        """
        if active.linger_timer is None:
            active.linger_timer = asyncio.get_running_loop().call_later(
                self._limits.linger_s, self.end, active, None
            )

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
            self.end(active, None)

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
            self.end(active, error)
        except Exception:
            logger.exception("request failed", extra={"request_id": state.request_id})
            self.end(active, InternalError("the router failed on this request"))

    def end(self, active: ActiveRequest, error: PdserveError | None) -> None:
        """Ends a sample; an error, or the last sample's end, is the end of its request.

        Later calls do nothing.
        """
        call = active.call
        failure = error or active.state.failure
        if failure is not None:
            self._end_call(call, failure)
            return
        if self._active.get(active.state.request_id) is not active:
            return
        self._drop(active)
        self._placer.note_output(active.output.num_tokens)
        self._note_cached_output(active)
        if not any(one.state.request_id in self._active for one in call.samples):
            self._end_call(call, None)

    def _drop(self, active: ActiveRequest) -> None:
        """Forgets a sample that has ended."""
        state = active.state
        del self._active[state.request_id]
        self._recovery.send_fences(state)
        self._placer.keep_only(state.request_id, ())
        if active.linger_timer is not None:
            active.linger_timer.cancel()
        if active.driver is not None and active.driver is not asyncio.current_task():
            active.driver.cancel()
        active.call.part(active)

    def _end_call(self, call: ClientCall, failure: PdserveError | None) -> None:
        """Gives a request its one terminal event; later calls do nothing."""
        if self._calls.get(call.request_id) is not call:
            return
        del self._calls[call.request_id]
        if not self._calls:
            self._idle.set()
        for active in call.samples:
            if self._active.get(active.state.request_id) is active:
                if failure is not None:
                    active.state.fail(failure)
                self._drop(active)
        now_s = self._clock.now()
        self.admission.leave(is_waiting=bool(call.waiting), service_s=now_s - call.received_s)
        if call.deadline_timer is not None:
            call.deadline_timer.cancel()
        if failure is None:
            call.buffer.end(Ending(completion=call.completion(now_s)))
        elif isinstance(failure, Overloaded | DeadlineExceeded | Cancelled):
            call.buffer.cut(failure)
        else:
            call.buffer.end(Ending(error=failure))
        call.explanation = call.explain("OK" if failure is None else failure.reason)
        self._explained.add(call.explanation)
        self._report(call, failure, now_s)

    def _note_cached_output(self, active: ActiveRequest) -> None:
        """A follow-up turn begins with this prompt and output: decode holds both."""
        state = active.state
        if state.placement is None:
            return
        tokens = (*state.request.token_ids, *state.token_ids)
        granules = hash_granules(tokens, state.request.tenant_salt)
        self._placer.note_cached(state.placement.decode, granules)

    def _refuse_stale(self, worker: WorkerKey, update: worker_pb2.SequenceUpdate) -> None:
        active = self._active.get(update.request_id)
        if active is not None and active.state.is_ended:
            self._take_late(active, worker, update)
            return
        self._metrics.stale_updates.inc()
        is_running_on = bool(update.token_ids) and update.WhichOneof("outcome") is None
        is_newest = active is not None and update.attempt >= active.state.attempt
        if is_running_on and not is_newest:
            self._recovery.send_cancel(worker, RequestId(update.request_id), update.attempt)

    def _report(self, call: ClientCall, failure: PdserveError | None, now_s: float) -> None:
        finish = call.samples[0].finish_reason if failure is None else failure.reason.lower()
        self._metrics.note_end(
            call.times,
            finish=finish,
            is_success=failure is None,
            prompt_tokens=call.request.num_prompt_tokens,
            output_tokens=call.num_output_tokens,
            now_s=now_s,
        )
        if failure is None:
            self.traffic.note_end(call.request.num_prompt_tokens, call.times.cached_tokens)
        status = "OK" if failure is None else failure.reason
        extra = {"status": status, "finish_reason": finish, **call.summary(now_s)}
        logger.info("request finished", extra=extra)
