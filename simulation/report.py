"""What a simulation comes to: goodput, latencies, hit rate, balance, cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.request import Role
from simulation.record import Outcome, Record

PERCENTILES = (50.0, 90.0, 99.0)


class GapHistogram:
    """Gaps between tokens in bins of 2 %: as many as there are tokens, in little memory."""

    _BINS_PER_E = 50

    def __init__(self) -> None:
        """Counts nothing."""
        self._counts: dict[int, int] = {}
        self.num_gaps = 0

    def add(self, gap_s: float, count: int) -> None:
        """Counts so many gaps of one length."""
        place = round(math.log(max(gap_s, 1e-9)) * self._BINS_PER_E)
        self._counts[place] = self._counts.get(place, 0) + count
        self.num_gaps += count

    def percentile(self, percent: float) -> float | None:
        """Returns a gap that so many of a hundred do not exceed; None without any."""
        left = self.num_gaps * percent / 100
        for place, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return math.exp(place / self._BINS_PER_E)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """What a request must meet to count."""

    ttft_s: float
    tpot_s: float

    def is_met(self, record: Record) -> bool:
        """Says whether a request met both."""
        return (
            record.ttft_s is not None
            and record.tpot_s is not None
            and record.ttft_s <= self.ttft_s
            and record.tpot_s <= self.tpot_s
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and percentiles of a latency; None where there was none."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The figures of one run."""

    num_requests: int
    num_done: int
    num_refused: int
    num_failed: int
    duration_s: float
    """From the first arrival to the last token."""
    offered_per_s: float
    """Requests for each second of arrivals."""
    ttft_attainment: float
    tpot_attainment: float
    attainment: float
    """Share of all requests that met both objectives."""
    goodput_per_s: float
    """Requests that met both, for each second of arrivals."""
    ttft: Spread
    tpot: Spread
    itl: Spread
    hit_rate: float
    """Prompt tokens found in a prefix cache where the prompt was computed."""
    prefill_imbalance: float
    """The busiest worker's time over the mean."""
    decode_imbalance: float
    prefill_utilization: float
    decode_utilization: float
    gpu_s_per_million_tokens: float
    """Prompt and output tokens of requests that were done."""


class Seen(Protocol):
    """What a run saw besides its records."""

    @property
    def gaps(self) -> GapHistogram:
        """Between tokens."""
        ...

    @property
    def busy_s(self) -> Mapping[Role, Sequence[float]]:
        """How long each worker computed."""
        ...

    def worker_s(self, role: Role) -> float:
        """Returns how long all workers of a pool were there."""
        ...


def make_report(
    records: Sequence[Record],
    seen: Seen,
    slo: Slo,
    num_gpus: float,
) -> Report:
    """Sums a run up; of pools that were sized, `num_gpus` is the mean."""
    done = [one for one in records if one.outcome is Outcome.DONE]
    begin_s = min((one.at_s for one in records), default=0.0)
    last_arrival_s = max((one.at_s for one in records), default=0.0)
    end_s = max((one.end_s for one in done if one.end_s is not None), default=last_arrival_s)
    duration_s = max(end_s - begin_s, 1e-9)
    met = sum(slo.is_met(one) for one in records)
    num_prompt = sum(one.num_prompt_tokens for one in done)
    num_tokens = num_prompt + sum(one.num_output_tokens for one in done)
    return Report(
        num_requests=len(records),
        num_done=len(done),
        num_refused=sum(one.outcome is Outcome.REFUSED for one in records),
        num_failed=sum(one.outcome not in (Outcome.DONE, Outcome.REFUSED) for one in records),
        duration_s=duration_s,
        offered_per_s=len(records) / max(last_arrival_s - begin_s, 1e-9),
        ttft_attainment=sum(one.ttft_s is not None and one.ttft_s <= slo.ttft_s for one in records)
        / max(len(records), 1),
        tpot_attainment=sum(one.tpot_s is not None and one.tpot_s <= slo.tpot_s for one in records)
        / max(len(records), 1),
        attainment=met / max(len(records), 1),
        goodput_per_s=met / max(last_arrival_s - begin_s, 1e-9),
        ttft=spread_of([one.ttft_s for one in done if one.ttft_s is not None]),
        tpot=spread_of(
            [one.tpot_s for one in done if one.tpot_s is not None and one.num_output_tokens > 1]
        ),
        itl=Spread(
            mean_s=None,
            p50_s=seen.gaps.percentile(50),
            p90_s=seen.gaps.percentile(90),
            p99_s=seen.gaps.percentile(99),
        ),
        hit_rate=sum(one.cached_tokens for one in done) / max(num_prompt, 1),
        prefill_imbalance=_imbalance(seen.busy_s[Role.PREFILL]),
        decode_imbalance=_imbalance(seen.busy_s[Role.DECODE]),
        prefill_utilization=_utilization(seen, Role.PREFILL),
        decode_utilization=_utilization(seen, Role.DECODE),
        gpu_s_per_million_tokens=num_gpus * duration_s / max(num_tokens, 1) * 1e6,
    )


def spread_of(values: Sequence[float]) -> Spread:
    """Returns mean and percentiles."""
    if not values:
        return Spread(mean_s=None, p50_s=None, p90_s=None, p99_s=None)
    ordered = sorted(values)
    p50_s, p90_s, p99_s = (percentile_of(ordered, percent) for percent in PERCENTILES)
    return Spread(mean_s=sum(ordered) / len(ordered), p50_s=p50_s, p90_s=p90_s, p99_s=p99_s)


def percentile_of(ordered: Sequence[float], percent: float) -> float:
    """Returns the smallest value that so many of a hundred do not exceed."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _imbalance(seconds: Sequence[float]) -> float:
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    return max(seconds) / mean if mean else 1.0


def _utilization(seen: Seen, role: Role) -> float:
    seconds = seen.worker_s(role)
    return sum(seen.busy_s[role]) / seconds if seconds else 0.0
