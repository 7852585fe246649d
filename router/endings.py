"""How requests end: with exactly one terminal event, and nothing of them left anywhere."""

import asyncio
import logging

from pdserve.errors import Cancelled, DeadlineExceeded, Overloaded, PdserveError
from pdserve.timeline import Clock
from router.active import ActiveRequest, ClientCall
from router.admission import Admission
from router.client_buffer import Ending
from router.explain import ExplainLog
from router.in_flight import InFlight
from router.metrics import RouterMetrics
from router.placer import Placer
from router.prefix_index import hash_granules
from router.recovery import Recovery
from router.traffic import TrafficMeter

logger = logging.getLogger(__name__)


class Endings:
    """Ends samples and requests, and says to all who count or explain them that they ended."""

    def __init__(
        self,
        in_flight: InFlight,
        recovery: Recovery,
        placer: Placer,
        admission: Admission,
        clock: Clock,
        metrics: RouterMetrics,
    ) -> None:
        """Takes what requests in flight hold places in."""
        self._in_flight = in_flight
        self._recovery = recovery
        self._placer = placer
        self._admission = admission
        self._clock = clock
        self._metrics = metrics
        self.traffic = TrafficMeter()
        self.explained = ExplainLog()

    def end(self, active: ActiveRequest, error: PdserveError | None) -> None:
        """Ends a sample; an error, or the last sample's end, is the end of its request.

        Later calls do nothing.
        """
        call = active.call
        failure = error or active.state.failure
        if failure is not None:
            self.end_call(call, failure)
            return
        if not self._in_flight.has(active):
            return
        self._drop(active)
        self._placer.note_output(active.output.num_tokens)
        self._note_cached_output(active)
        if not any(self._in_flight.has(one) for one in call.samples):
            self.end_call(call, None)

    def end_later(self, active: ActiveRequest, wait_s: float) -> None:
        """Keeps the completion back for the prefill worker's times, which are on their way.

        The client has all its tokens; decode was quicker than the acknowledgement to prefill.
        """
        if active.linger_timer is None:
            active.linger_timer = asyncio.get_running_loop().call_later(
                wait_s, self.end, active, None
            )

    def end_call(self, call: ClientCall, failure: PdserveError | None) -> None:
        """Gives a request its one terminal event; later calls do nothing."""
        if not self._in_flight.remove(call):
            return
        for active in call.samples:
            if self._in_flight.has(active):
                if failure is not None:
                    active.state.fail(failure)
                self._drop(active)
        now_s = self._clock.now()
        self._admission.leave(is_waiting=bool(call.waiting), service_s=now_s - call.received_s)
        if call.deadline_timer is not None:
            call.deadline_timer.cancel()
        if failure is None:
            call.buffer.end(Ending(completion=call.completion(now_s)))
        elif isinstance(failure, Overloaded | DeadlineExceeded | Cancelled):
            call.buffer.cut(failure)
        else:
            call.buffer.end(Ending(error=failure))
        call.explanation = call.explain("OK" if failure is None else failure.reason)
        self.explained.add(call.explanation)
        self._report(call, failure, now_s)

    def _drop(self, active: ActiveRequest) -> None:
        """Forgets a sample that has ended."""
        state = active.state
        del self._in_flight.samples[state.request_id]
        self._recovery.send_fences(state)
        self._placer.keep_only(state.request_id, ())
        if active.linger_timer is not None:
            active.linger_timer.cancel()
        if active.driver is not None and active.driver is not asyncio.current_task():
            active.driver.cancel()
        active.call.part(active)

    def _note_cached_output(self, active: ActiveRequest) -> None:
        """A follow-up turn begins with this prompt and output: decode holds both."""
        state = active.state
        if state.placement is None:
            return
        tokens = (*state.request.token_ids, *state.token_ids)
        granules = hash_granules(tokens, state.request.tenant_salt)
        self._placer.note_cached(state.placement.decode, granules)

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
