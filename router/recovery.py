"""What takes time in a request's life: finding workers, submitting, placing again, fencing.

A request waits here for a place, at most `no_worker_wait_s` in one go, over all refusals. Every
try is a new attempt; the attempt before it is cancelled on all workers that may hold it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    LocalPrefillRefused,
    NoBrain,
    NoWorker,
    Overloaded,
    PdserveError,
    StaleAttempt,
    TransferError,
    WorkerLost,
)
from pdserve.request import Request, RequestId
from pdserve.rpc.codec import request_to_wire
from pdserve.rpc.v1 import worker_pb2
from pdserve.timeline import Clock
from router.active import ActiveRequest
from router.admission import Admission
from router.attempt import Cause, Phase, Placement
from router.metrics import RouterMetrics
from router.placer import PlaceQuery, Placer
from router.policy import Choice
from router.request_state import RequestState
from router.slo import TooLate
from router.worker_key import WorkerKey
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_AVOID_S = 0.5
"""A worker that refused without a hint is not asked again for this long."""
_MIN_AVOID_S = 0.02
_UNKNOWN_S = 0.1
"""Likewise of a worker that the brain of several fronts knows, and this one does not."""
_MAX_REMEMBERED_CANCELS = 4096
_RETRYABLE = (
    Overloaded,
    NoWorker,
    StaleAttempt,
    WorkerLost,
    DeadlineExceeded,
    TransferError,
    Cancelled,
)
"""Of a submit: full, draining, restarted, dead, silent, or shut down in the middle of the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on one request."""

    max_attempts: int
    max_client_buffer_bytes: int
    call_timeout_s: float
    submit_timeout_s: float
    no_worker_wait_s: float
    max_local_tokens: int = 0
    """Uncached tokens that a decode worker may prefill while there is a prefill pool."""
    linger_s: float = 1.0
    """A completion waits this long for the prefill worker's times."""


class Recovery:
    """Starts attempts and fences old ones. Holds no request; works for the dispatcher."""

    def __init__(
        self,
        pool: WorkerPool,
        placer: Placer,
        admission: Admission,
        clock: Clock,
        limits: Limits,
        metrics: RouterMetrics,
    ) -> None:
        """Takes what it works on."""
        self._pool = pool
        self._placer = placer
        self._admission = admission
        self._clock = clock
        self._limits = limits
        self._metrics = metrics
        self._background: set[asyncio.Task[None]] = set()
        self._cancelled: OrderedDict[tuple[WorkerKey, RequestId, int], None] = OrderedDict()

    async def begin_attempt(self, active: ActiveRequest) -> None:
        """Finds workers and sends the next attempt off.

        Raises:
            WorkerLost: no attempt is left.
            NoWorker, Overloaded: no worker took it in time.
            TooLong: no worker can ever hold it.
        """
        state = active.state
        if not state.has_attempts_left:
            raise WorkerLost(f"{state.num_failed_attempts} attempts failed, none is left")
        if not active.call.waiting:
            self._admission.wait_again()
        active.call.waiting.add(active)
        choice = await self._find_pair(active)
        request = self._begin(active, choice)
        active.moved.clear()
        active.call.waiting.remove(active)
        if not active.call.waiting:
            self._admission.start()
        self._metrics.note_pick(choice)
        if state.attempt > 1:
            self._metrics.note_attempt(state.last_cause)
            logger.info(
                "next attempt",
                extra={
                    "request_id": state.request_id,
                    "trace_id": state.request.trace_id,
                    "attempt": state.attempt,
                    "cause": state.last_cause,
                    "num_emitted": state.next_index,
                },
            )
        wire = worker_pb2.SubmitRequest(request=request_to_wire(request))
        if choice.prefill is not None:
            wire.decode.CopyFrom(self._target(choice.decode, state.decode_attempt))
        else:
            wire.local_prefill.CopyFrom(self._local_prefill())
        receiver = choice.prefill or choice.decode
        wire.incarnation = receiver.incarnation
        self._spawn(self._submit(active, receiver, wire))

    def _begin(self, active: ActiveRequest, choice: Choice) -> Request:
        """Starts the attempt of a sample and of those that set out with it."""
        call, now_s = active.call, self._clock.now()
        deadline_at_s = call.deadline_at_s
        remaining_s = None if deadline_at_s is None else max(deadline_at_s - now_s, 0.0)
        placement = Placement(prefill=choice.prefill, decode=choice.decode)
        requests = []
        for one in active.mates:
            requests.append(one.state.begin_attempt(placement, remaining_s))
            one.times.note_dispatch(now_s)
            one.prefill_worker = choice.prefill.worker_id if choice.prefill else ""
            one.decode_worker = choice.decode.worker_id
        if call.samples[0] in active.mates:
            call.note_choice(active.state.attempt, choice, now_s)
        first = requests[0]
        if active not in call.together:
            return first
        return replace(
            first,
            request_id=call.request_id,
            handoff_id=call.handoff_id,
            sampling=replace(first.sampling, n=call.request.sampling.n),
        )

    async def place_decode(self, active: ActiveRequest) -> None:
        """Gives held KV another decode worker, or gives the attempt up.

        The prefill worker ends the wait itself when its hold time is over.
        """
        state = active.state
        wanted, placement = state.needs_placement, state.placement
        assert wanted is not None
        assert placement is not None
        assert placement.prefill is not None
        hint_s = wanted.retry_after_s if wanted.HasField("retry_after_s") else None
        self._avoid(active, placement.decode, hint_s)
        give_up_at_s = self._clock.now() + wanted.hold_s
        while state.phase is Phase.UNPLACED and state.needs_placement is wanted:
            now_s, seen = self._clock.now(), self._pool.changes.count
            try:
                query = self._query(active, now_s)
                choice = await self._placer.place_decode(query, placement.prefill)
            except NoWorker:
                if now_s >= give_up_at_s:
                    self._give_up(_held_with(active), Cause.RETURNED)
                    return
                # Short, because the prefill worker may take its KV back meanwhile.
                await self._wait_for_worker(active, min(give_up_at_s - now_s, _AVOID_S / 2), seen)
                continue
            except WorkerLost:
                self._give_up(_held_with(active), Cause.WORKER_LOST)
                return
            # Meanwhile the prefill worker may have died, or taken its KV back.
            is_wanted = state.needs_placement is wanted
            if state.phase is Phase.UNPLACED and is_wanted and self._reaches(active, choice):
                self._send_placement(active, placement.prefill, choice.decode)
                return
            for one in active.mates:
                self._placer.keep_only(one.state.request_id, one.state.holders())

    def send_fences(self, state: RequestState) -> None:
        """Cancels what a state machine has given up."""
        for fence in state.take_fences():
            self.send_cancel(fence.worker, state.request_id, fence.attempt)

    def send_cancel(self, worker: WorkerKey, request_id: RequestId, attempt: int) -> None:
        """Cancels an attempt on one worker, once, best effort: a dead worker holds nothing."""
        key = (worker, request_id, attempt)
        if key in self._cancelled:
            return
        self._cancelled[key] = None
        if len(self._cancelled) > _MAX_REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        self._metrics.fenced_attempts.inc()
        self._spawn(self._cancel(worker, request_id, attempt))

    async def settle(self, timeout_s: float) -> None:
        """Waits until calls in flight are answered, or the time is over."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)

    async def _find_pair(self, active: ActiveRequest) -> Choice:
        waits_for_turn = not (active.state.attempt or active.state.next_index)
        is_brainless = False
        if active.waiting_since_s is None:
            active.waiting_since_s = self._clock.now()
            active.last_refusal = None
        while True:
            now_s, seen = self._clock.now(), self._pool.changes.count
            query = self._query(active, now_s, waits_for_turn=waits_for_turn)
            try:
                choice = await self._placer.place(query)
            except TooLate:
                self._metrics.slo_refusals.inc()
                raise
            except NoWorker as error:
                now_s = self._clock.now()
                if waits_for_turn and not is_brainless:
                    # The wait for a turn does not count.
                    active.waiting_since_s = now_s
                is_brainless = isinstance(error, NoBrain)
                waits_for_turn = waits_for_turn and is_brainless
                give_up_at_s = active.waiting_since_s + self._limits.no_worker_wait_s
                if now_s >= give_up_at_s:
                    raise active.last_refusal or error from error
                await self._wait_for_worker(active, give_up_at_s - now_s, seen)
                continue
            if self._reaches(active, choice):
                return choice
            waits_for_turn = False
            for one in active.mates:
                self._placer.keep_only(one.state.request_id, ())

    def _reaches(self, active: ActiveRequest, choice: Choice) -> bool:
        """Says whether this front knows the workers that were chosen; else they are avoided."""
        chosen = (choice.decode,) if choice.prefill is None else (choice.prefill, choice.decode)
        unknown = [worker for worker in chosen if not self._pool.knows(worker)]
        for worker in unknown:
            self._avoid(active, worker, _UNKNOWN_S)
        return not unknown

    async def _wait_for_worker(self, active: ActiveRequest, timeout_s: float, seen: int) -> None:
        retry_s = active.next_retry_s(self._clock.now())
        await self._pool.changes.wait(seen, min(timeout_s, retry_s or timeout_s))

    def _query(
        self, active: ActiveRequest, now_s: float, *, waits_for_turn: bool = False
    ) -> PlaceQuery:
        state = active.state
        num_tokens = state.request.num_prompt_tokens + state.next_index
        slo, is_new = active.call.slo, state.attempt == 0 and state.next_index == 0
        waited_s = now_s - active.call.received_s
        return PlaceQuery(
            request_id=state.request_id,
            followers=tuple(one.state.request_id for one in active.mates if one is not active),
            num_tokens=num_tokens,
            num_growth_tokens=state.request.sampling.max_tokens - state.next_index,
            granules=active.call.granules,
            # What was running already goes through the prefill pool's priority lane.
            may_be_local=state.attempt == 0 and not active.is_local_refused,
            excluded=active.excluded(now_s),
            has_prefill_pool=self._pool.has_prefill_pool,
            tpot_slo_s=slo.tpot_s,
            ttft_slo_s=None if slo.ttft_s is None or not is_new else slo.ttft_s - waited_s,
            tenant=active.call.tenant,
            priority=slo.priority,
            waits_for_turn=waits_for_turn,
        )

    async def _submit(
        self, active: ActiveRequest, receiver: WorkerKey, wire: worker_pb2.SubmitRequest
    ) -> None:
        state, attempt = active.state, wire.request.attempt
        try:
            await self._pool.link(receiver).submit(wire, self._limits.submit_timeout_s)
        except PdserveError as error:
            if state.attempt == attempt and state.speaks_for(receiver):
                self._take_refusal(active, receiver, error)
            return
        active.waiting_since_s = None

    def _take_refusal(
        self, active: ActiveRequest, receiver: WorkerKey, error: PdserveError
    ) -> None:
        if isinstance(error, LocalPrefillRefused) and self._pool.has_prefill_pool:
            active.is_local_refused = True
            self._metrics.note_refusal(error)
            self._give_up(_submitted_with(active, receiver), Cause.REFUSED)
            return
        if not isinstance(error, _RETRYABLE):
            active.fatal_refusal = error
            active.moved.set()
            return
        active.last_refusal = error if isinstance(error, Overloaded | NoWorker) else None
        hint_s = error.retry_after_s if isinstance(error, Overloaded | NoWorker) else None
        self._avoid(active, receiver, hint_s)
        self._metrics.note_refusal(error)
        self._give_up(_submitted_with(active, receiver), Cause.REFUSED)

    def _send_placement(self, active: ActiveRequest, prefill: WorkerKey, decode: WorkerKey) -> None:
        state = active.state
        for one in _held_with(active):
            decode_attempt = one.state.begin_placement(decode)
            self._placer.keep_only(one.state.request_id, one.state.holders())
            one.decode_worker = decode.worker_id
        active.moved.clear()
        self._metrics.replacements.inc()
        wire = worker_pb2.PlaceDecodeRequest(
            request_id=active.wire_id,
            attempt=state.attempt,
            decode=self._target(decode, decode_attempt),
        )
        self._spawn(self._place(active, prefill, wire))

    async def _place(
        self, active: ActiveRequest, prefill: WorkerKey, wire: worker_pb2.PlaceDecodeRequest
    ) -> None:
        state = active.state
        try:
            await self._pool.link(prefill).place_decode(wire, self._limits.submit_timeout_s)
        except PdserveError as error:
            is_current = state.attempt == wire.attempt and state.speaks_for(prefill)
            if is_current and state.decode_attempt == wire.decode.decode_attempt:
                self._metrics.note_refusal(error)
                self._give_up(_held_with(active), Cause.RETURNED)

    async def _cancel(self, worker: WorkerKey, request_id: RequestId, attempt: int) -> None:
        try:
            link = self._pool.link(worker)
            await link.cancel(request_id, attempt, self._limits.call_timeout_s)
        except PdserveError as error:
            # A frozen worker that wakes up goes on with the attempt: then it is told again.
            self._cancelled.pop((worker, request_id, attempt), None)
            logger.debug(
                "cancel not delivered",
                extra={
                    "request_id": request_id,
                    "worker_id": worker.worker_id,
                    "reason": error.reason,
                },
            )

    def _give_up(self, samples: Sequence[ActiveRequest], cause: Cause) -> None:
        for one in samples:
            one.state.give_up_attempt(cause)
            self.send_fences(one.state)
            self._placer.keep_only(one.state.request_id, ())
            one.moved.set()

    def _avoid(self, active: ActiveRequest, worker: WorkerKey, hint_s: float | None) -> None:
        wait_s = _AVOID_S if hint_s is None else max(hint_s, _MIN_AVOID_S)
        active.avoided_until_s[worker] = self._clock.now() + wait_s

    def _local_prefill(self) -> worker_pb2.LocalPrefill:
        """Bounds what a wrong hint can cost; without a prefill pool there is no other way."""
        if not self._pool.has_prefill_pool:
            return worker_pb2.LocalPrefill()
        return worker_pb2.LocalPrefill(max_tokens=self._limits.max_local_tokens)

    def _target(self, decode: WorkerKey, decode_attempt: int) -> worker_pb2.DecodeTarget:
        return worker_pb2.DecodeTarget(
            worker_id=decode.worker_id,
            incarnation=decode.incarnation,
            address=self._pool.link(decode).record.address,
            decode_attempt=decode_attempt,
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _submitted_with(active: ActiveRequest, receiver: WorkerKey) -> tuple[ActiveRequest, ...]:
    """Returns a sample and those that a worker got, or was to get, with it."""
    return tuple(one for one in active.mates if one.state.speaks_for(receiver))


def _held_with(active: ActiveRequest) -> tuple[ActiveRequest, ...]:
    """Returns a sample and those whose KV is held on prefill with its own."""
    before_decode = (Phase.PREFILLING, Phase.UNPLACED)
    return tuple(one for one in active.mates if one is active or one.state.phase in before_decode)
