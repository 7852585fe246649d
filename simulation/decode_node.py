"""A decode worker in virtual time: the production scheduler, uneventful steps booked at once.

    idle --landed--> run (steps without any event) --its last step--> run, step or idle
                      |   ^
       reservation    '---'  the steps that have ended are booked, the rest goes on
       landed, local prompt  the step in flight is the last of the run

A step that the scheduler must plan (a prompt is computed here, or blocks run short) is one event.
What lands while a step is in flight joins at its end, as in the engine.
"""

from dataclasses import dataclass
from typing import Protocol

from decode_worker.admission import Grant, Refusal
from decode_worker.occupancy import LetGo
from decode_worker.progress import DecodeProgress
from decode_worker.scheduler import DecodeScheduler
from decode_worker.skipping import TokenMaker
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.step_log import MAX_SAMPLES_A_KIND, StepLog
from pdserve.request import Request, RequestId, SampledToken
from router.worker_key import WorkerKey
from simulation.clock import EventQueue
from simulation.pace import Pace, RunTime


class DecodeOutlet(Protocol):
    """What hears of a decode worker."""

    def has_started(self, node: "DecodeNode", request: Request, step_end_s: float) -> None:
        """A landed sequence is in the step that ends then: its next token."""
        ...

    def has_stepped(self, num_tokens: int, step_s: float) -> None:
        """So many tokens came this long after the ones before them."""
        ...

    def has_sampled(self, node: "DecodeNode", progress: DecodeProgress) -> None:
        """A planned step made a token."""
        ...

    def has_ended(self, node: "DecodeNode", request: Request) -> None:
        """A sequence made its last token now."""
        ...

    def has_let_go(self, node: "DecodeNode", let_go: LetGo) -> None:
        """A sequence was given up."""
        ...


@dataclass(slots=True)
class _Run:
    begin_s: float
    num_steps: int
    num_sequences: int
    num_kv_tokens: int
    """That the first step reads."""
    time: RunTime

    @property
    def end_s(self) -> float:
        return self.begin_s + self.time.total_s(self.num_steps)

    def forget(self, num_steps: int) -> None:
        """Begins behind steps that have ended."""
        self.begin_s += self.time.total_s(num_steps)
        self.time = self.time.after(num_steps)
        self.num_kv_tokens += num_steps * self.num_sequences
        self.num_steps -= num_steps


class DecodeNode:
    """One decode worker, from its start to its death."""

    def __init__(
        self,
        key: WorkerKey,
        scheduler: DecodeScheduler,
        pace: Pace,
        queue: EventQueue,
        outlet: DecodeOutlet,
        make_token: TokenMaker,
        *,
        skips_steps: bool = True,
    ) -> None:
        """Starts idle."""
        self._skips_steps = skips_steps
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
        """When what it receives has come."""
        self._queue = queue
        self._outlet = outlet
        self._make_token = make_token
        self._run: _Run | None = None
        self._is_stepping = False
        self._version = 0
        self._landed: list[Request] = []

    @property
    def is_idle(self) -> bool:
        """Has nothing to compute; reservations, as in production, do not count."""
        is_still = self._run is None and not self._is_stepping and not self._landed
        return is_still and self.scheduler.ledger().sequences == 0

    def change_pace(self, slowness: float) -> None:
        """Takes so many times as long from the next step on."""
        self._end_run_soon()
        self.pace.slowness = slowness

    def reserve(self, request: Request) -> Grant | Refusal:
        """Takes blocks for a request, as they are at this instant."""
        self._book_past_steps()
        answer = self.scheduler.reserve(request)
        self._shorten_run()
        return answer

    def release_reservation(self, request_id: RequestId, attempt: int) -> None:
        """Gives a reservation back."""
        self._landed = [one for one in self._landed if one.request_id != request_id]
        self.scheduler.release_reservation(request_id, attempt)
        self._begin_if_idle()

    def land(self, request: Request) -> None:
        """Lets a reserved sequence, whose KV and first token are there, join the next step."""
        self._landed.append(request)
        self._end_run_soon()
        self._begin_if_idle()

    def submit_local(self, request: Request, max_prefill_tokens: int | None = None) -> None:
        """Takes a request that is prefilled here."""
        self._book_past_steps()
        self.scheduler.submit_local(request, max_prefill_tokens)
        self._end_run_soon()
        self._begin_if_idle()

    def book_until_now(self) -> None:
        """Brings the scheduler up to this instant."""
        self._book_past_steps()

    def _begin_if_idle(self) -> None:
        if self._run is None and not self._is_stepping:
            self._begin()

    def _begin(self) -> None:
        """Starts what comes next; no step is in flight."""
        started, self._landed = self._landed, []
        for request in started:
            token = self._make_token(request)
            self.scheduler.start(request.request_id, request.attempt, {request.sample_index: token})
        num_steps = self.scheduler.skipper.next_event_horizon() if self._skips_steps else 0
        if num_steps:
            end_s = self._begin_run(num_steps)
        else:
            plan = self.scheduler.plan_step()
            for let_go in self.scheduler.take_let_go():
                self._outlet.has_let_go(self, let_go)
            if plan is None:
                return
            end_s = self._begin_step(plan)
        for request in started:
            self._outlet.has_started(self, request, end_s)

    def _begin_run(self, num_steps: int) -> float:
        skipper = self.scheduler.skipper
        num_sequences = skipper.num_running
        num_kv_tokens = skipper.num_kv_tokens
        time = self.pace.run_time(num_sequences, num_kv_tokens)
        self._run = _Run(self._queue.now(), num_steps, num_sequences, num_kv_tokens, time)
        self._schedule_run_end()
        return self._run.begin_s + time.first_s

    def _schedule_run_end(self) -> None:
        run = self._run
        assert run is not None
        self._version += 1
        version = self._version
        self._queue.at(run.end_s, lambda: self._end_run(version))

    def _end_run(self, version: int) -> None:
        if version != self._version or self.is_dead:
            return
        run, self._run = self._run, None
        assert run is not None
        self._book(run, run.num_steps)
        self._begin()

    def _book_past_steps(self) -> None:
        run = self._run
        if run is None:
            return
        # At least one step stays in flight: it ends with its event.
        done = run.time.num_within(self._queue.now() - run.begin_s, run.num_steps - 1)
        if done:
            self._book(run, done)
            run.forget(done)

    def _book(self, run: _Run, num_steps: int) -> None:
        total_s = run.time.total_s(num_steps)
        self.busy_s += total_s
        self._outlet.has_stepped(num_steps * run.num_sequences, total_s / num_steps)
        if self.log is not None:
            for step in range(max(0, num_steps - MAX_SAMPLES_A_KIND), num_steps):
                num_kv_tokens = run.num_kv_tokens + step * run.num_sequences
                self.log.note_decode(run.num_sequences, num_kv_tokens, run.time.step_s(step))
        ended = self.scheduler.skipper.skip_steps(num_steps, total_s / num_steps, self._make_token)
        for request in ended:
            self._outlet.has_ended(self, request)

    def _shorten_run(self) -> None:
        """Ends the run before blocks run short, after a reservation has taken some."""
        run = self._run
        if run is None:
            return
        # Each sequence has room for its next token: reservations leave it.
        horizon = max(1, self.scheduler.skipper.next_event_horizon())
        if horizon < run.num_steps:
            run.num_steps = horizon
            self._schedule_run_end()

    def _end_run_soon(self) -> None:
        """Makes the step in flight the last of its run."""
        self._book_past_steps()
        if self._run is not None and self._run.num_steps > 1:
            self._run.num_steps = 1
            self._schedule_run_end()

    def _begin_step(self, plan: StepPlan) -> float:
        self._is_stepping = True
        step_s = self.pace.step_s(plan.slices)
        self.busy_s += step_s
        self._queue.after(step_s, lambda: self._end_step(plan, step_s))
        return self._queue.now() + step_s

    def _end_step(self, plan: StepPlan, step_s: float) -> None:
        if self.is_dead:
            return
        self._is_stepping = False
        if self.log is not None:
            self.log.note(plan, step_s)
        sampled = {
            part.request.request_id: SampledToken(token_id=self._make_token(part.request))
            for part in plan.slices
        }
        for progress in self.scheduler.complete_step(plan, StepResult(sampled=sampled)):
            if progress.output_index:
                self._outlet.has_stepped(1, step_s)
            self._outlet.has_sampled(self, progress)
        self._begin()
