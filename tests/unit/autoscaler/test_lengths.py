"""How much prompts differ, from counters of requests and tokens."""

import random
from collections.abc import Callable, Iterable

import pytest

from autoscaler.lengths import LengthMeter


def see(meter: LengthMeter, counts: Iterable[int], draw: Callable[[], int]) -> None:
    """Shows it so many requests with each look."""
    requests = tokens = 0
    for second, count in enumerate(counts):
        requests += count
        tokens += sum(draw() for _ in range(count))
        meter.note(float(second), requests, tokens)


def test_prompts_of_one_length_do_not_vary_although_their_rate_does() -> None:
    meter = LengthMeter()
    see(meter, [1, 9, 0, 30, 2] * 40, lambda: 700)
    assert meter.variability == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("counts", [[1] * 3000, [20] * 900, [2] * 800 + [40] * 100])
def test_lengths_are_told_from_counters_however_many_come_between_two_looks(
    counts: list[int],
) -> None:
    # Half of 100 and half of 1900 tokens: the deviation is 0.9 of the mean.
    source, meter = random.Random(5), LengthMeter()
    see(meter, counts, lambda: source.choice((100, 1900)))
    assert meter.variability == pytest.approx(0.81, rel=0.2)


def test_before_some_requests_nothing_is_said() -> None:
    source, meter = random.Random(5), LengthMeter()
    see(meter, [1] * 16, lambda: source.choice((100, 1900)))
    assert meter.variability == 0.0


def test_counters_that_start_anew_are_no_length() -> None:
    meter = LengthMeter()
    see(meter, [5] * 50, lambda: 700)
    meter.note(51.0, 3, 2100)
    meter.note(52.0, 6, 4200)
    assert meter.variability == pytest.approx(0.0, abs=1e-9)
