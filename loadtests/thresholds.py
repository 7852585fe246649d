"""What a run must hold to pass: pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """A whole run."""

    num_requests: int
    """That ended, well or not."""
    num_failures: int
    num_good: int
    ttft_p99_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """None is not checked."""

    min_requests: int = 1
    """A run of fewer requests proves nothing."""
    max_failure_share: float = 0.0
    min_good_share: float | None = None
    max_ttft_p99_ms: float | None = None
    max_itl_p99_ms: float | None = None


def missed(figures: RunFigures, thresholds: Thresholds) -> list[str]:
    """Says in a line each what was not held."""
    lines = []
    count = figures.num_requests
    if count < thresholds.min_requests:
        lines.append(f"{count} requests, fewer than {thresholds.min_requests}")
    if figures.num_failures > thresholds.max_failure_share * count:
        share = thresholds.max_failure_share
        lines.append(f"{figures.num_failures} of {count} requests failed, more than {share:.2%}")
    if thresholds.min_good_share is not None:
        share = figures.num_good / max(1, count)
        if share < thresholds.min_good_share:
            lines.append(
                f"{share:.1%} of requests were good, below {thresholds.min_good_share:.1%}"
            )
    for name, value, limit in (
        ("TTFT", figures.ttft_p99_ms, thresholds.max_ttft_p99_ms),
        ("ITL", figures.itl_p99_ms, thresholds.max_itl_p99_ms),
    ):
        if limit is not None and value > limit:
            lines.append(f"p99 of {name} was {value:.0f} ms, above {limit:.0f} ms")
    return lines
