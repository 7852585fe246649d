"""How the rate of requests goes up and down: shapes that autoscalers are tried on."""

import math
from collections.abc import Callable

Rate = Callable[[float], float]
"""Requests per second at a time."""


def step(before: float, after: float, at_s: float) -> Rate:
    """Jumps once, and stays."""
    return lambda now_s: before if now_s < at_s else after


def ramp(first: float, last: float, over_s: float) -> Rate:
    """Climbs evenly, and stays."""
    return lambda now_s: first + (last - first) * min(now_s / over_s, 1.0)


def diurnal(least: float, most: float, period_s: float) -> Rate:
    """Swings as a cosine, from its least on."""
    return lambda now_s: (
        least + (most - least) / 2 * (1.0 - math.cos(2 * math.pi * now_s / period_s))
    )


def bursts(base: float, peak: float, *, every_s: float, length_s: float) -> Rate:
    """Bursts at once, and then again and again; between them the base."""
    return lambda now_s: peak if now_s % every_s < length_s else base


def idle(rate: float, begin_s: float, end_s: float) -> Rate:
    """Is silent for a while."""
    return lambda now_s: 0.0 if begin_s <= now_s < end_s else rate


def sway(rate: float, share: float, period_s: float) -> Rate:
    """Goes from a share above to a share below, and back."""
    return lambda now_s: rate * (1 + share if now_s % period_s < period_s / 2 else 1 - share)
