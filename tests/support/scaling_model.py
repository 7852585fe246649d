"""A small queueing model of two pools, for tests of the scaling policy.

Prompts wait in one queue for the next free prefill replica; sequences share a decode replica's
steps. Replicas take time to start, are slow at first, and finish what they have before they leave.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

from autoscaler.figures import Decision, Reading, Traffic, WorkerFigures
from autoscaler.policy import ScalingPolicy
from autoscaler.queueing import servers_needed
from autoscaler.sample_feed import SampleFeed
from autoscaler.settings import ScalingSettings
from pdserve.predictor.predictor import DecodeSample, Predictor, PrefillSample, Sample
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation, Role

TICK_S = 0.2
WORKER_CLASS = "model"
PROFILE = Profile(
    worker_class=WORKER_CLASS,
    prefill=(0.01, 0.0002, 0.0),
    decode=(0.02, 0.0006, 0.0),
    transfer=(0.001, 1e-10),
    kv_bytes_per_token=1000,
    kv_tokens=100_000,
)
BLOCK = 16
REPORT_EVERY = 10
"""Readings between two samples of a replica; a real one reports several each second."""


@dataclass(slots=True)
class Job:
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None = None
    last_s: float | None = None


@dataclass(slots=True)
class Replica:
    worker_id: str
    role: Role
    ordered_s: float
    ready_s: float
    is_draining: bool = False
    free_s: float = 0.0
    """Prefill: when it is done with its prompt."""
    held: list[Job] = field(default_factory=list)
    turns: float = 0.0
    """Decode: tokens that each sequence got so far."""
    running: list[tuple[float, int, Job]] = field(default_factory=list)
    kv_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    """Since its last report."""

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.held


@dataclass
class Outcome:
    jobs: list[Job]
    decisions: list[Decision]
    replica_s: dict[Role, float]
    sizes: list[tuple[float, int, int]]
    """Time, prefill and decode replicas that were ordered and not drained."""
    num_killed_first: int = 0

    def attainment(self, ttft_s: float, *, after_s: float = 0.0) -> float:
        jobs = [job for job in self.jobs if job.arrived_s >= after_s]
        met = [j for j in jobs if j.first_s is not None and j.first_s - j.arrived_s <= ttft_s]
        return len(met) / len(jobs) if jobs else 1.0

    def worst_ttft_s(self) -> float:
        end_s = self.sizes[-1][0]
        return max((job.first_s or end_s) - job.arrived_s for job in self.jobs)

    def mean_tpot_s(self) -> float:
        done = [j for j in self.jobs if j.last_s is not None and j.first_s is not None]
        return sum((j.last_s - j.first_s) / j.output_tokens for j in done) / len(done)  # type: ignore[operator]

    def unfinished(self) -> int:
        return sum(job.last_s is None for job in self.jobs)

    def most_reversals(self, role: Role, within_s: float = 600.0) -> int:
        """The most changes of direction of a pool within any ten minutes."""
        turns = []
        for before, after in pairwise([d for d in self.decisions if d.role is role]):
            if before.kind != after.kind:
                turns.append(after.at_s)
        return max((sum(t <= other < t + within_s for other in turns) for t in turns), default=0)

    def largest(self, role: Role) -> int:
        column = 1 if role is Role.PREFILL else 2
        return max(size[column] for size in self.sizes)

    def size_at(self, at_s: float, role: Role) -> int:
        column = 1 if role is Role.PREFILL else 2
        return next(size[column] for size in reversed(self.sizes) if size[0] <= at_s)


class ScalingModel:
    def __init__(
        self,
        settings: ScalingSettings,
        rate: Callable[[float], float],
        *,
        seed: int = 1,
        start_s: float = 20.0,
        cold_s: float = 5.0,
        cold_factor: float = 3.0,
        is_fitted: bool = True,
        num_prefill: int = 1,
        num_decode: int = 1,
        mean_prompt: float = 1000.0,
        mean_output: float = 100.0,
        actual: Profile = PROFILE,
        max_num_seqs: int = 64,
    ) -> None:
        self.settings = settings
        self.rate = rate
        self.numbers = random.Random(seed)
        self.start_s, self.cold_s, self.cold_factor = start_s, cold_s, cold_factor
        self.is_fitted = is_fitted
        predictor = Predictor([PROFILE] if is_fitted else [])
        self.policy = ScalingPolicy(settings, predictor)
        self.feed = SampleFeed(predictor)
        self.num_reports = 0
        self.actual = actual
        self.max_num_seqs = max_num_seqs
        self.mean_prompt, self.mean_output = mean_prompt, mean_output
        self.replicas: dict[str, Replica] = {}
        self.num_made = 0
        self.queue: deque[Job] = deque()
        self.computed: list[tuple[float, int, Job, Replica]] = []
        self.jobs: list[Job] = []
        self.num_events = 0
        self.prompt_tokens = 0
        self.output_tokens = 0.0
        self.decisions: list[Decision] = []
        self.replica_s = dict.fromkeys(Role, 0.0)
        self.sizes: list[tuple[float, int, int]] = []
        self.is_registry_away: Callable[[float], bool] = lambda _: False
        self.is_router_away: Callable[[float], bool] = lambda _: False
        self.served_lost = 0
        for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
            for _ in range(count):
                self._start(role, -1000.0)

    def run(self, duration_s: float) -> Outcome:
        now_s, next_decision_s = 0.0, 0.0
        while now_s < duration_s:
            self._tick(now_s)
            now_s = round(now_s + TICK_S, 6)
            if now_s >= next_decision_s:
                next_decision_s += 1.0
                reading = self.reading(now_s)
                self.feed.take(reading.workers)
                for decision in self.policy.decide(now_s, reading):
                    self.decisions.append(decision)
                    self._carry_out(now_s, decision)
                self.sizes.append((now_s, *(len(self._active(r)) for r in Role)))
        return Outcome(self.jobs, self.decisions, self.replica_s, self.sizes, self.served_lost)

    def reading(self, now_s: float) -> Reading:
        prefill = [r for r in self._active(Role.PREFILL) if r.ready_s <= now_s]
        queued = sum(job.prompt_tokens for job in self.queue)
        share = queued // len(prefill) if prefill else 0
        workers = []
        self.num_reports += 1
        for one in self.replicas.values():
            samples: tuple[Sample, ...] = ()
            if self.num_reports % REPORT_EVERY == 0:
                samples, one.samples = tuple(one.samples[-1:]), []
            is_serving = one.ready_s <= now_s and not one.is_draining
            is_prefill = one.role is Role.PREFILL
            workers.append(
                WorkerFigures(
                    worker_id=one.worker_id,
                    role=one.role,
                    is_serving=is_serving and not self.is_registry_away(now_s),
                    is_draining=one.is_draining,
                    worker_class=WORKER_CLASS,
                    queued_tokens=share if is_prefill and is_serving else 0,
                    num_running=int(one.free_s > now_s) if is_prefill else len(one.running),
                    num_held=len(one.held),
                    used_blocks=one.kv_tokens // BLOCK,
                    total_blocks=self.actual.kv_tokens // BLOCK,
                    max_num_seqs=self.max_num_seqs,
                    life=Incarnation(int(one.worker_id.rpartition("-")[2])),
                    report=self.num_reports,
                    samples=samples if self.is_fitted else (),
                )
            )
        waiting = [job.arrived_s for job in self.queue]
        waiting += [entry[2].arrived_s for entry in self.computed]
        traffic = Traffic(
            num_arrived=len(self.jobs),
            prompt_tokens=self.prompt_tokens,
            output_tokens=int(self.output_tokens),
            num_waiting=0 if prefill else len(self.queue),
            waiting_tokens=0 if prefill else queued,
            oldest_s=now_s - min(waiting, default=now_s),
            num_in_flight=len(waiting)
            + sum(len(r.running) + len(r.held) for r in self.replicas.values()),
        )
        return Reading(
            workers=tuple(workers), traffic=None if self.is_router_away(now_s) else traffic
        )

    def _start(self, role: Role, now_s: float) -> None:
        name = f"{role}-{self.num_made}"
        self.num_made += 1
        self.replicas[name] = Replica(name, role, now_s, now_s + self.start_s)

    def _active(self, role: Role) -> list[Replica]:
        return [r for r in self.replicas.values() if r.role is role and not r.is_draining]

    def _carry_out(self, now_s: float, decision: Decision) -> None:
        for name in decision.retired:
            one = self.replicas[name]
            starting = [r for r in self._active(one.role) if r.ready_s > now_s]
            self.served_lost += one.ready_s <= now_s and bool(starting)
            one.is_draining = True
            if one.ready_s > now_s:
                del self.replicas[name]
        if decision.kind == "grow":
            for _ in range(decision.size - len(self._active(decision.role))):
                self._start(decision.role, now_s)

    def _tick(self, now_s: float) -> None:
        end_s = now_s + TICK_S
        self._arrive(now_s)
        self._prefill(now_s, end_s)
        while self.computed and self.computed[0][0] <= end_s:
            at_s, _, job, replica = heappop(self.computed)
            job.first_s = at_s
            replica.held.append(job)
        for replica in list(self.replicas.values()):
            for job in list(replica.held):
                if self._place(end_s, job):
                    replica.held.remove(job)
        self._decode(now_s, end_s)
        for one in list(self.replicas.values()):
            self.replica_s[one.role] += TICK_S
            if one.is_draining and one.is_empty and one.free_s <= end_s:
                del self.replicas[one.worker_id]

    def _arrive(self, now_s: float) -> None:
        at_s, rate = now_s, self.rate(now_s)
        while rate > 0:
            at_s += self.numbers.expovariate(rate)
            if at_s >= now_s + TICK_S:
                return
            prompt = max(16, int(self.mean_prompt * self.numbers.lognormvariate(-0.125, 0.5)))
            output = max(2, int(self.numbers.expovariate(1 / self.mean_output)))
            job = Job(at_s, prompt, output)
            self.jobs.append(job)
            self.queue.append(job)
            self.prompt_tokens += prompt

    def _note(self, replica: Replica, sample: Sample) -> None:
        replica.samples.append(sample)

    def _pace(self, replica: Replica, now_s: float) -> float:
        return self.cold_factor if now_s < replica.ready_s + self.cold_s else 1.0

    def _prefill(self, now_s: float, end_s: float) -> None:
        ready = [r for r in self._active(Role.PREFILL) if r.ready_s <= now_s and len(r.held) < 8]
        while self.queue and ready:
            one = min(ready, key=lambda r: r.free_s)
            start_s = max(one.free_s, self.queue[0].arrived_s, now_s)
            if start_s >= end_s:
                return
            job = self.queue.popleft()
            spent_s = self.actual.prefill_s(job.prompt_tokens, 0) * self._pace(one, now_s)
            one.free_s = start_s + spent_s
            self._note(
                one,
                PrefillSample(num_tokens=job.prompt_tokens, num_context_tokens=0, seconds=spent_s),
            )
            self.num_events += 1
            heappush(self.computed, (one.free_s, self.num_events, job, one))

    def _place(self, now_s: float, job: Job) -> bool:
        tokens = job.prompt_tokens + job.output_tokens
        fitting = [
            r
            for r in self._active(Role.DECODE)
            if r.ready_s <= now_s
            and len(r.running) < self.max_num_seqs
            and r.kv_tokens + tokens <= self.actual.kv_tokens
        ]
        if not fitting:
            return False
        one = min(fitting, key=lambda r: len(r.running))
        self.num_events += 1
        heappush(one.running, (one.turns + job.output_tokens, self.num_events, job))
        one.kv_tokens += tokens
        return True

    def _decode(self, now_s: float, end_s: float) -> None:
        for one in self.replicas.values():
            if not one.running:
                continue
            step_s = self.actual.decode_step_s(len(one.running), one.kv_tokens)
            turns = TICK_S / (step_s * self._pace(one, now_s))
            self._note(
                one,
                DecodeSample(
                    num_sequences=len(one.running),
                    num_kv_tokens=one.kv_tokens,
                    seconds=TICK_S / turns,
                ),
            )
            one.turns += turns
            self.output_tokens += turns * len(one.running)
            while one.running and one.running[0][0] <= one.turns:
                job = heappop(one.running)[2]
                job.last_s = end_s
                one.kv_tokens -= job.prompt_tokens + job.output_tokens


def optimum_replica_s(
    settings: ScalingSettings, rate: Callable[[float], float], duration_s: float
) -> dict[Role, float]:
    """Returns what somebody spends who knows all rates beforehand and needs no time to start."""
    service_s = PROFILE.prefill_s(1000, 0)
    largest = int((settings.tpot_s - PROFILE.decode[0]) / PROFILE.decode[1])
    spent = dict.fromkeys(Role, 0.0)
    step_s = 5.0
    for index in range(int(duration_s / step_s)):
        now = rate(index * step_s)
        prefill = servers_needed(
            now * service_s,
            service_s,
            settings.ttft_s - service_s,
            tail=settings.tail,
            utilization=settings.utilization,
        )
        # Little's law: sequences = rate x output tokens x time per token, with the batch that
        # just meets the target.
        sequences = now * 100 * settings.tpot_s
        decode = math.ceil(sequences / min(largest, 64))
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            spent[role] += step_s * settings.range_of(role).clamp(count)
    return spent
