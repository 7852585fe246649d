"""A prefill worker in virtual time: the production scheduler, steps that take what a law says."""

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.step_log import StepLog
from pdserve.request import Request, RequestId, SampledToken
from prefill_worker.scheduler import PrefillProgress, PrefillScheduler
from router.worker_key import WorkerKey
from simulation.clock import EventQueue
from simulation.pace import Pace

_TOKEN = SampledToken(token_id=0)


class PrefillOutlet(Protocol):
    """What hears of a prefill worker."""

    def wants_reservations(self, node: "PrefillNode", requests: Sequence[Request]) -> None:
        """These entered the look-ahead window."""
        ...

    def has_computed(self, node: "PrefillNode", progress: PrefillProgress) -> None:
        """A chunk has ended, maybe the last one."""
        ...


class PrefillNode:
    """One prefill worker, from its start to its death."""

    def __init__(
        self,
        key: WorkerKey,
        scheduler: PrefillScheduler,
        pace: Pace,
        queue: EventQueue,
        outlet: PrefillOutlet,
    ) -> None:
        """Starts idle."""
        self.key = key
        self.scheduler = scheduler
        self.pace = pace
        self.log: StepLog | None = None
        """Of what its steps took; None: nobody asks."""
        self.is_dead = False
        self.is_draining = False
        """It takes nothing new."""
        self.busy_s = 0.0
        self.link_free_s = 0.0
        """When what it sends has left."""
        self._queue = queue
        self._outlet = outlet
        self._is_stepping = False

    @property
    def is_idle(self) -> bool:
        """Has nothing to compute, and holds nothing that decode would have."""
        ledger = self.scheduler.ledger()
        return not self._is_stepping and ledger.sequences == 0 and ledger.held_handoffs == 0

    def change_pace(self, slowness: float) -> None:
        """Takes so many times as long from the next step on."""
        self.pace.slowness = slowness

    def submit(self, request: Request) -> None:
        """Takes a request."""
        self.scheduler.submit(request)
        self._go_on()

    def release(self, request_id: RequestId, attempt: int) -> None:
        """Frees a sequence that was handed off; the queue may go on with its blocks."""
        self.scheduler.release(request_id, attempt)
        self._go_on()

    def cancel(self, request_id: RequestId) -> None:
        """Drops a request at any stage."""
        self.scheduler.cancel(request_id)
        self._go_on()

    def _go_on(self) -> None:
        if self.is_dead:
            return
        self._ask_ahead()
        if self._is_stepping:
            return
        plan = self.scheduler.plan_step()
        if plan is None:
            return
        self._is_stepping = True
        step_s = self.pace.step_s(plan.slices)
        self.busy_s += step_s
        self._queue.after(step_s, lambda: self._end_step(plan, step_s))
        self._ask_ahead()

    def _ask_ahead(self) -> None:
        requests = self.scheduler.requests_in_window()
        if requests:
            self._outlet.wants_reservations(self, requests)

    def _end_step(self, plan: StepPlan, step_s: float) -> None:
        if self.is_dead:
            return
        self._is_stepping = False
        if self.log is not None:
            self.log.note(plan, step_s)
        sampled = {part.request.request_id: _TOKEN for part in plan.slices}
        for progress in self.scheduler.complete_step(plan, StepResult(sampled=sampled)):
            self._outlet.has_computed(self, progress)
        self._go_on()
