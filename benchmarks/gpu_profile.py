"""Where the time of a decode step goes on the GPU: by kernel, and idle between and within steps."""

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_harness import Stand, time_decode

STEP_KERNEL = "step_inputs_kernel"
"""Its launch begins a step on the device."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Means over steps, microseconds."""

    num_steps: int
    step_us: float
    busy_us: float
    between_us: float
    """Idle from the last kernel of a step to the first of the next, copies between them not."""
    within_us: float
    kernels: list[tuple[str, float, float]]
    """Name, time in a step, launches in a step; the longest first."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One piece of work of the device, microseconds."""

    name: str
    start: float
    end: float


def profile_decode(stand: Stand, batch: int, prompt: int, num_tokens: int = 24) -> StepProfile:
    """Profiles the steps of a batch."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        time_decode(stand, batch, prompt, num_tokens)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    work = [
        Interval(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in DEVICE_WORK and "dur" in event
    ]
    return summarize(work)


def summarize(work: list[Interval], num_skipped: int = 6) -> StepProfile:
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
    starts = set(begins)
    between = within = 0.0
    end = work[first].start
    time_of: dict[str, float] = defaultdict(float)
    count_of: dict[str, int] = defaultdict(int)
    since_forward = False
    for index in range(first, last):
        one = work[index]
        gap = max(0.0, one.start - end)
        # Copies to and from the host stand between the last kernel of a step and the next one.
        is_copy = one.name.startswith("Mem")
        if index in starts or is_copy or since_forward:
            between += gap
        else:
            within += gap
        since_forward = is_copy
        end = max(end, one.end)
        time_of[one.name] += one.end - one.start
        count_of[one.name] += 1
    span = work[last].start - work[first].start
    kernels = [(name, us / num_steps, count_of[name] / num_steps) for name, us in time_of.items()]
    return StepProfile(
        num_steps=num_steps,
        step_us=span / num_steps,
        busy_us=(span - between - within) / num_steps,
        between_us=between / num_steps,
        within_us=within / num_steps,
        kernels=sorted(kernels, key=lambda one: -one[1]),
    )
