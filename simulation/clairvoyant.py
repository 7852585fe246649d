"""What somebody spends who knows all rates beforehand, and whose replicas start in no time.

For each stretch of time as many replicas as queueing theory asks for: for prefill the fewest that
keep the tail of TTFT (`autoscaler.queueing`), for decode as many as hold the sequences there are
but for the same tail, each at the largest batch that keeps TPOT. How many there are is Little's law
on the mean, and by chance more: as for a Poisson number, by its normal approximation.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

from autoscaler.queueing import servers_needed
from autoscaler.settings import ScalingSettings
from pdserve.request import Role
from simulation.bounds import alone_s, split_uncached
from simulation.load_shapes import Rate
from simulation.shape import ClusterShape
from simulation.workload import Workload

RATE_STEP_S = 5.0
"""A rate that is known as a function is looked at so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What comes within some time, on the mean."""

    seconds: float
    requests_per_s: float
    service_s: float
    """Of a prompt on a prefill worker of its own."""
    output_tokens: float
    context_tokens: float
    """That a sequence holds, on the mean of its life."""


def stretches_of(workload: Workload, shape: ClusterShape, window_s: float) -> Iterator[Stretch]:
    """Cuts a workload into windows, as many of one length as are nearest to `window_s`.

    All that was asked before counts as cached.
    """
    arrivals = list(split_uncached(workload))
    if not arrivals:
        return
    last_s = arrivals[-1][0].at_s
    num_windows = max(1, round(last_s / window_s))
    window_s = last_s / num_windows or window_s
    index = 0
    for number in range(num_windows):
        count = service_s = output = context = 0.0
        end_s = math.inf if number + 1 == num_windows else (number + 1) * window_s
        while index < len(arrivals) and arrivals[index][0].at_s < end_s:
            one, uncached = arrivals[index]
            index += 1
            count += 1
            service_s += alone_s(shape.prefill, uncached, one.num_prompt_tokens - uncached)
            output += one.num_output_tokens
            context += one.num_prompt_tokens + one.num_output_tokens / 2
        each = max(count, 1.0)
        yield Stretch(
            seconds=window_s,
            requests_per_s=count / window_s,
            service_s=service_s / each,
            output_tokens=output / each,
            context_tokens=context / each,
        )


def stretches_at(
    rate: Rate, duration_s: float, workload: Workload, shape: ClusterShape
) -> Iterator[Stretch]:
    """Follows a rate that is known, with requests as a workload's are on the mean."""
    (mean,) = stretches_of(workload, shape, workload.arrivals[-1].at_s + 1.0)
    for number in range(round(duration_s / RATE_STEP_S)):
        yield Stretch(
            seconds=RATE_STEP_S,
            requests_per_s=rate(number * RATE_STEP_S),
            service_s=mean.service_s,
            output_tokens=mean.output_tokens,
            context_tokens=mean.context_tokens,
        )


def optimum_sizes(one: Stretch, shape: ClusterShape, settings: ScalingSettings) -> dict[Role, int]:
    """Returns the replicas that a stretch needs, within the pools' ranges."""
    sequences = one.requests_per_s * one.output_tokens * settings.tpot_s
    sequences += NormalDist().inv_cdf(1.0 - settings.tail) * math.sqrt(sequences)
    needed = {
        Role.PREFILL: servers_needed(
            one.requests_per_s * one.service_s,
            one.service_s,
            settings.ttft_s - one.service_s,
            tail=settings.tail,
            utilization=settings.utilization,
        ),
        Role.DECODE: math.ceil(sequences / _largest_batch(one, shape, settings)),
    }
    return {role: settings.range_of(role).clamp(count) for role, count in needed.items()}


def optimum_replica_s(
    stretches: Iterable[Stretch], shape: ClusterShape, settings: ScalingSettings
) -> dict[Role, float]:
    """Returns the replica seconds of each pool, over all stretches."""
    spent = dict.fromkeys(Role, 0.0)
    for one in stretches:
        for role, count in optimum_sizes(one, shape, settings).items():
            spent[role] += one.seconds * count
    return spent


def _largest_batch(one: Stretch, shape: ClusterShape, settings: ScalingSettings) -> float:
    profile = shape.decode
    fixed, per_sequence, per_token = profile.decode
    each_s = per_sequence + per_token * one.context_tokens
    by_time = (settings.tpot_s - fixed) / each_s if each_s else math.inf
    by_kv = settings.kv_share * profile.kv_tokens / max(one.context_tokens, 1.0)
    return max(1.0, math.floor(min(by_time, by_kv, profile.max_num_seqs)))
