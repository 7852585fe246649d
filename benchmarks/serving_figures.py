"""From the times of tokens to the figures of a load point, and the bound that queueing sets."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.processes import percentile
from benchmarks.serving_load import Answered


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of one figure over the requests of a load point."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a load point's clients saw."""

    num_requests: int
    num_failed: int
    ttft: Spread
    token_2: Spread
    """From sending the request to its second token."""
    first_gap: Spread
    """From token 1 to token 2."""
    longest_gap: Spread
    tpot: Spread
    step_ms: float
    """The median of all gaps behind the second token: a decode step at the batch that there was."""
    mean_running: float
    """Requests between their first and last token, over the time of arrivals."""
    done_per_s: float
    """Requests that ended in the second half of the time of arrivals, per second."""


def make_figures(answered: Sequence[Answered], output_tokens: int) -> Figures:
    """Sums a load point up; a request that got fewer tokens counts as failed.

    Raises:
        ValueError: every request failed.
    """
    good = [one for one in answered if sum(one.num_tokens) == output_tokens and not one.error]
    if not good:
        raise ValueError(f"every request failed: {answered[0].error or 'too few tokens'}")
    gaps_s = [_gaps(one) for one in good]
    arrivals_s = [one.sent_s for one in answered]
    begin_s, end_s = min(arrivals_s), max(arrivals_s)
    middle_s = (begin_s + end_s) / 2
    num_done = sum(middle_s < one.at_s[-1] <= end_s for one in good)
    busy_s = sum(one.at_s[-1] - one.at_s[0] for one in good)
    last_s = max(one.at_s[-1] for one in good)
    return Figures(
        num_requests=len(answered),
        num_failed=len(answered) - len(good),
        ttft=_spread([one.at_s[0] - one.sent_s for one in good]),
        token_2=_spread([_second_s(one) - one.sent_s for one in good]),
        first_gap=_spread([_second_s(one) - one.at_s[0] for one in good]),
        longest_gap=_spread([max(gaps) for gaps in gaps_s]),
        tpot=_spread([(one.at_s[-1] - one.at_s[0]) / (output_tokens - 1) for one in good]),
        step_ms=1e3 * statistics.median(gap for gaps in gaps_s for gap in gaps[1:]),
        mean_running=busy_s / (last_s - begin_s),
        done_per_s=num_done / (end_s - middle_s) if end_s > middle_s else 0.0,
    )


def queue_bound(answered: Sequence[Answered], *, service_s: float, idle_ttft_s: float) -> Spread:
    """Returns the TTFT of these arrivals if their prompts queued for one prefill GPU.

    Args:
        answered: whatever became of them.
        service_s: what a prompt keeps the GPU from the next one.
        idle_ttft_s: of a request alone.
    """
    waits_s = queue_waits_s([one.sent_s for one in answered], service_s)
    return _spread([wait_s + idle_ttft_s for wait_s in waits_s])


def queue_waits_s(arrivals_s: Sequence[float], service_s: float) -> list[float]:
    """Returns how long each arrival waits for one server that takes the same time for each.

    Lindley's recursion over the very arrivals that were sent: M/D/1 without the luck of the draw.
    """
    waits_s: list[float] = []
    free_s = 0.0
    for arrival_s in sorted(arrivals_s):
        start_s = max(arrival_s, free_s)
        waits_s.append(start_s - arrival_s)
        free_s = start_s + service_s
    return waits_s


def _gaps(one: Answered) -> list[float]:
    """Returns the gaps between events; tokens of one event have none between them."""
    return [late - early for early, late in zip(one.at_s, one.at_s[1:], strict=False)]


def _second_s(one: Answered) -> float:
    """Returns when the second token came, which may be with the first."""
    return one.at_s[0] if one.num_tokens[0] > 1 else one.at_s[1]


def _spread(values_s: Sequence[float]) -> Spread:
    return Spread(p50_ms=1e3 * statistics.median(values_s), p99_ms=1e3 * percentile(values_s, 0.99))
