"""Where the time of a decode step goes on the GPU: by kernel, and idle between and within steps."""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_harness import Stand, time_decode, time_prefill
from pdserve.engine.batch import PendingStep, StepPlan, StepRunner

STEP_KERNEL = "step_inputs_kernel"
"""Its launch begins a step on the device."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelShare:
    """What a kernel or copy takes of a step."""

    name: str
    us: float
    """From its launch on the device to its end, summed; a dependent launch waits for the one
    before, which counts."""
    adds_us: float
    """From the end of what ended before it, or its own start, to its end, summed: all of them add
    up to the time in which the device is busy."""
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Means over steps, microseconds."""

    num_steps: int
    step_us: float
    busy_us: float
    """Some kernel or copy was there; dependent launches overlap, so kernels add up to more."""
    kernels: list[KernelShare]
    """In a step; what adds most comes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Idle time of the device between steps, microseconds, measured by events in its stream."""

    mean_us: float
    median_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class Interval:
    """One piece of work of the device, microseconds."""

    name: str
    start: float
    end: float


class MarkingRunner:
    """Puts an event before and one behind the work of each step."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.begins: list[torch.cuda.Event] = []
        self.ends: list[torch.cuda.Event] = []

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        pending = self._runner.launch(plan)
        end.record()
        self.begins.append(begin)
        self.ends.append(end)
        return pending


def measure_gaps(stand: Stand, batch: int, prompt: int, num_tokens: int = 64) -> Gaps:
    """Measures what the device waits for between decode steps."""
    runner = MarkingRunner(stand.runner)
    time_decode(replace(stand, runner=runner), batch, prompt, num_tokens)
    torch.cuda.synchronize()
    pairs = zip(runner.ends[4:-1], runner.begins[5:], strict=True)
    gaps = [1000 * end.elapsed_time(begin) for end, begin in pairs]
    return Gaps(mean_us=statistics.mean(gaps), median_us=statistics.median(gaps), max_us=max(gaps))


def profile_decode(stand: Stand, batch: int, prompt: int, num_tokens: int = 24) -> StepProfile:
    """Profiles the steps of a batch by kernel."""
    return _profile(lambda: time_decode(stand, batch, prompt, num_tokens), num_skipped=6)


def profile_prefill(stand: Stand, batch: int, prompt: int, cached: int = 0) -> StepProfile:
    """Profiles steps of prompts by kernel."""
    return _profile(lambda: time_prefill(stand, batch, prompt, cached, runs=6), num_skipped=2)


def _profile(work: Callable[[], object], num_skipped: int) -> StepProfile:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        Interval(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in DEVICE_WORK and "dur" in event
    ]
    return summarize(found, num_skipped)


def summarize(work: list[Interval], num_skipped: int) -> StepProfile:
    """Cuts a trace into steps and adds up.

    Args:
        work: of one device, in any order.
        num_skipped: first steps that are left out; the last one is too.

    Raises:
        ValueError: there are too few steps.
    """
    work = sorted(work, key=lambda one: one.start)
    begins = [index for index, one in enumerate(work) if STEP_KERNEL in one.name]
    if len(begins) < num_skipped + 3:
        raise ValueError(f"a profile needs {num_skipped + 3} steps, got {len(begins)}")
    first, last = begins[num_skipped], begins[-1]
    num_steps = len(begins) - num_skipped - 1
    end = work[first].start
    time_of: dict[str, float] = defaultdict(float)
    added_by: dict[str, float] = defaultdict(float)
    count_of: dict[str, int] = defaultdict(int)
    for one in sorted(work[first:last], key=lambda one: one.end):
        time_of[one.name] += one.end - one.start
        added_by[one.name] += one.end - max(one.start, end)
        end = one.end
        count_of[one.name] += 1
    span = work[last].start - work[first].start
    kernels = [
        KernelShare(
            name=name,
            us=us / num_steps,
            adds_us=added_by[name] / num_steps,
            launches=count_of[name] / num_steps,
        )
        for name, us in time_of.items()
    ]
    return StepProfile(
        num_steps=num_steps,
        step_us=span / num_steps,
        busy_us=sum(added_by.values()) / num_steps,
        kernels=sorted(kernels, key=lambda one: -one.adds_us),
    )
