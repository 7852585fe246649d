"""Takes as much of a trace as there is time to simulate, and says what was taken."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from pdserve.errors import ConfigError
from simulation.workload import Workload

LEAST_DURATION_S = 0.1
"""Requests a second say nothing of less."""
MOST_DURATION_S = 366 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A stretch of a workload, with what came before it to fill the caches."""

    workload: Workload
    num_warm_up: int
    """Leading requests that are served and not counted."""
    text: str

    @property
    def counted_s(self) -> float:
        """From the first request that counts to the last."""
        arrivals = self.workload.arrivals
        return arrivals[-1].at_s - arrivals[self.num_warm_up].at_s


def check_durations(workload: Workload, sample: Sample) -> None:
    """Refuses what has no rate: requests of one instant, or with years between them.

    Raises:
        ConfigError: the sample is too short, or the workload too long.
    """
    if not sample.counted_s >= LEAST_DURATION_S:
        raise ConfigError(
            f"trace {workload.name}: the requests to count must come over at least "
            f"{LEAST_DURATION_S:g} s, got {sample.counted_s:g} s between the first and the last "
            f"of {len(sample.workload.arrivals) - sample.num_warm_up}",
            settings=("trace",),
        )
    if workload.duration_s > MOST_DURATION_S:
        raise ConfigError(
            f"trace {workload.name} must last at most {MOST_DURATION_S:.0f} s, got "
            f"{workload.duration_s:g} s",
            settings=("trace",),
        )


def take_busiest(workload: Workload, max_requests: int, warm_up_share: float = 0.25) -> Sample:
    """Returns the stretch of so many requests that brings most prompt tokens a second.

    What serves the busiest stretch serves the others. A workload that is short enough is taken
    whole, without a warm-up.
    """
    arrivals = workload.arrivals
    if len(arrivals) <= max_requests:
        text = f"all {len(arrivals)} requests of {workload.name}"
        return Sample(workload=workload, num_warm_up=0, text=text)
    num_warm_up = round(max_requests * warm_up_share)
    begin = _busiest_start(workload, max_requests - num_warm_up, num_warm_up)
    return _take(workload, begin, max_requests, num_warm_up, "the busiest ")


def take_stretch(
    workload: Workload, num_requests: int, number: int, warm_up_share: float = 0.25
) -> Sample:
    """Returns the n-th stretch of so many requests, from 0, of those that follow one another."""
    num_warm_up = round(num_requests * warm_up_share)
    begin = number * num_requests + num_warm_up
    assert begin - num_warm_up + num_requests <= len(workload.arrivals), "beyond the end"
    return _take(workload, begin, num_requests, num_warm_up, "")


def _take(
    workload: Workload, begin: int, num_requests: int, num_warm_up: int, which: str
) -> Sample:
    """Returns the requests that are counted from `begin` on, and those before them."""
    arrivals, num_counted = workload.arrivals, num_requests - num_warm_up
    first = begin - num_warm_up
    start_s = arrivals[first].at_s
    taken = tuple(
        replace(one, at_s=one.at_s - start_s) for one in arrivals[first : begin + num_counted]
    )
    seconds = arrivals[begin + num_counted - 1].at_s - arrivals[begin].at_s
    text = (
        f"{which}{seconds:.0f} s of {workload.duration_s:.0f} s of {workload.name}: "
        f"{num_counted} of {len(arrivals)} requests from {arrivals[begin].at_s:.0f} s on, "
        f"behind {num_warm_up} that only fill caches"
    )
    sample = replace(workload, name=f"{workload.name} (sample)", arrivals=taken)
    return Sample(workload=sample, num_warm_up=num_warm_up, text=text)


def _busiest_start(workload: Workload, num_counted: int, num_warm_up: int) -> int:
    arrivals = workload.arrivals
    sums = [0]
    for one in arrivals:
        sums.append(sums[-1] + one.num_prompt_tokens)
    best, best_rate = num_warm_up, 0.0
    for begin in range(num_warm_up, len(arrivals) - num_counted + 1):
        end = begin + num_counted
        seconds = arrivals[end - 1].at_s - arrivals[begin].at_s
        rate = (sums[end] - sums[begin]) / max(seconds, 1e-9)
        if rate > best_rate:
            best, best_rate = begin, rate
    # Requests of one instant belong together.
    return max(num_warm_up, bisect_left(arrivals, arrivals[best].at_s, key=lambda one: one.at_s))
