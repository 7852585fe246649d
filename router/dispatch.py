"""Requests in flight: worker updates in, tokens and one terminal event out.

The reader of worker streams calls in here and never waits. What needs a peer's answer (placing,
submitting, cancelling) is done by one driver task per request, see `recovery`.
"""

import asyncio
import logging
from collections.abc import Sequence

from pdserve.detokenizer import TokenTable
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    Overloaded,
    PdserveError,
)
from pdserve.request import FinishReason, HandoffId, Request, RequestId
from pdserve.rpc.v1 import worker_pb2
from pdserve.timeline import Clock
from router.active import ActiveRequest
from router.admission import Admission
from router.client_buffer import ClientBuffer, Ending
from router.metrics import RouterMetrics
from router.output import Output
from router.placer import Placer
from router.policy import WorkerKey
from router.prefix_index import hash_granules
from router.recovery import Limits, Recovery
from router.request_state import Finish, Phase, RequestState, Token
from router.timing import RequestTimes
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
        self._active: dict[RequestId, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._recovery = Recovery(pool, placer, admission, clock, limits, metrics)
        pool.listen(self)

    @property
    def num_in_flight(self) -> int:
        """Requests without their terminal event."""
        return len(self._active)

    def start(
        self,
        request: Request,
        handoff_id: HandoffId,
        received_s: float | None = None,
        tenant: str = "",
    ) -> ActiveRequest:
        """Admits a checked request and begins to place it.

        Args:
            request: the first attempt's request; its deadline counts from now.
            handoff_id: names its hand-offs.
            received_s: when the client's message came; now, when None.
            tenant: on whose behalf; nobody else may abort it.

        Raises:
            Overloaded: a limit is reached.
            InvalidField: a request of this id is in flight.
        """
        if request.request_id in self._active:
            raise InvalidField("request_id", request.request_id, "unique among those in flight")
        self.admission.admit()
        now_s = self._clock.now()
        deadline_s = request.deadline_s
        active = ActiveRequest(
            state=RequestState(request, handoff_id, self._limits.max_attempts),
            output=Output(self._table, request.sampling),
            times=RequestTimes(now_s if received_s is None else received_s),
            buffer=ClientBuffer(self._limits.max_client_buffer_bytes),
            granules=hash_granules(request.token_ids, request.tenant_salt),
            deadline_at_s=None if deadline_s is None else now_s + deadline_s,
            tenant=tenant,
        )
        self._active[request.request_id] = active
        self._idle.clear()
        active.driver = asyncio.create_task(
            self._drive(active), name=f"request-{request.request_id}"
        )
        if deadline_s is not None:
            active.deadline_timer = asyncio.get_running_loop().call_later(
                deadline_s, self.end, active, DeadlineExceeded(f"no end within {deadline_s:.3f} s")
            )
        return active

    def cancel(self, active: ActiveRequest) -> None:
        """Ends a request whose client is gone; nothing happens when it has ended."""
        self.end(active, Cancelled("the client cancelled the request"))

    def abort(self, request_id: RequestId, tenant: str = "") -> bool:
        """Ends a tenant's request by its id; False when the tenant has none of this id."""
        active = self._active.get(request_id)
        if active is None or active.tenant != tenant:
            return False
        self.end(active, Cancelled("the request was aborted"))
        return True

    def end_all(self, error: PdserveError) -> None:
        """Ends what is in flight, at shutdown."""
        for active in list(self._active.values()):
            self.end(active, error)

    async def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    async def settle(self, timeout_s: float) -> None:
        """Waits until the cancels that were sent are answered, or the time is over."""
        await self._recovery.settle(timeout_s)

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Takes one iteration's updates of a worker."""
        for update in batch.updates:
            active = self._active.get(RequestId(update.request_id))
            if active is None or not active.state.is_current(worker, update):
                self._refuse_stale(worker, update)
                continue
            try:
                self._apply(active, worker, update)
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
            )
            for active in self._active.values()
            if active.state.speaks_for(worker)
        ]

    def _apply(
        self, active: ActiveRequest, worker: WorkerKey, update: worker_pb2.SequenceUpdate
    ) -> None:
        state = active.state
        phase = state.phase
        tokens = state.apply(worker, update)
        if update.HasField("times"):
            active.times.note_stages(update.attempt, update.times)
        if tokens or state.finish is not None:
            self._emit(active, tokens)
        if state.phase is not phase or update.WhichOneof("outcome") is not None:
            self._follow(active)

    def _emit(self, active: ActiveRequest, tokens: Sequence[Token]) -> None:
        now_s = self._clock.now()
        last_s = active.times.last_token_s
        active.times.note_tokens(len(tokens), now_s)
        self._metrics.note_tokens(len(tokens), None if last_s is None else now_s - last_s)
        delta = active.output.push(tokens, active.state.finish)
        if active.output.matched_stop is not None:
            active.state.stop_early(Finish(reason=FinishReason.STOP, stop_token_id=None))
        if not active.buffer.push(delta):
            limit = self._limits.max_client_buffer_bytes
            self._metrics.slow_readers.inc()
            self.end(active, Overloaded(f"the client reads too slowly: over {limit} bytes wait"))

    def _follow(self, active: ActiveRequest) -> None:
        """Does at once what a change of state asks for; the driver does what takes time."""
        state = active.state
        self._recovery.send_fences(state)
        self._pool.book.keep_only(state.request_id, state.holders())
        if state.is_ended:
            if state.awaits_prefill:
                self._linger(active)
            else:
                self.end(active, None)
        elif state.phase in (Phase.WAITING, Phase.UNPLACED):
            active.moved.set()

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
                if state.phase is Phase.WAITING:
                    await self._recovery.begin_attempt(active)
                elif state.phase is Phase.UNPLACED:
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
        """Gives a request its one terminal event; later calls do nothing."""
        state = active.state
        if self._active.get(state.request_id) is not active:
            return
        del self._active[state.request_id]
        if not self._active:
            self._idle.set()
        if error is not None:
            state.fail(error)
        self._recovery.send_fences(state)
        self._pool.book.keep_only(state.request_id, ())
        now_s = self._clock.now()
        self.admission.leave(
            is_waiting=active.is_waiting, service_s=now_s - active.times.received_s
        )
        for timer in (active.deadline_timer, active.linger_timer):
            if timer is not None:
                timer.cancel()
        if active.driver is not None and active.driver is not asyncio.current_task():
            active.driver.cancel()
        failure = error or state.failure
        if failure is None:
            self._note_cached_output(active)
            active.buffer.end(Ending(completion=active.completion(now_s)))
        elif isinstance(failure, Overloaded | DeadlineExceeded | Cancelled):
            active.buffer.cut(failure)
        else:
            active.buffer.end(Ending(error=failure))
        self._report(active, failure, now_s)

    def _note_cached_output(self, active: ActiveRequest) -> None:
        """A follow-up turn begins with this prompt and output: decode holds both."""
        state = active.state
        if state.placement is None:
            return
        tokens = (*state.request.token_ids, *state.token_ids)
        granules = hash_granules(tokens, state.request.tenant_salt)
        self._placer.note_cached(state.placement.decode, granules)

    def _refuse_stale(self, worker: WorkerKey, update: worker_pb2.SequenceUpdate) -> None:
        active = self._active.get(RequestId(update.request_id))
        if active is not None and active.state.is_ended:
            self._take_late(active, worker, update)
            return
        self._metrics.stale_updates.inc()
        is_running_on = bool(update.token_ids) and update.WhichOneof("outcome") is None
        is_newest = active is not None and update.attempt >= active.state.attempt
        if is_running_on and not is_newest:
            self._recovery.send_cancel(worker, RequestId(update.request_id), update.attempt)

    def _report(self, active: ActiveRequest, failure: PdserveError | None, now_s: float) -> None:
        state, times, output = active.state, active.times, active.output
        finish = active.finish_reason if failure is None else failure.reason.lower()
        self._metrics.note_end(
            times,
            finish=finish,
            is_success=failure is None,
            prompt_tokens=state.request.num_prompt_tokens,
            output_tokens=output.num_tokens,
            now_s=now_s,
        )
        logger.info(
            "request finished",
            extra={
                "request_id": state.request_id,
                "handoff_id": state.handoff_id,
                "status": "OK" if failure is None else failure.reason,
                "finish_reason": finish,
                "prompt_tokens": state.request.num_prompt_tokens,
                "output_tokens": output.num_tokens,
                "attempts": state.attempt,
                "preemptions": state.num_preemptions,
                "prefill_worker": active.prefill_worker,
                "decode_worker": active.decode_worker,
                "ttft_s": times.ttft_s,
                "tpot_s": times.tpot_s,
                "total_s": now_s - times.received_s,
            },
        )
