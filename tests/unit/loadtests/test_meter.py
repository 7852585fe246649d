import pytest

from loadtests.meter import GENERATE, GOODPUT, ITL, TTFT, Event, Meter, Objectives

OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.1)


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def test_the_first_tokens_are_the_ttft_and_each_later_message_a_gap() -> None:
    meter = Meter(OBJECTIVES, 10.0)
    assert meter.take_tokens(10.5, 1) == Event(name=TTFT, seconds=0.5, num_tokens=1)
    assert meter.take_tokens(10.75, 2) == Event(name=ITL, seconds=0.25, num_tokens=2)
    assert meter.take_tokens(10.875, 1) == Event(name=ITL, seconds=0.125, num_tokens=1)
    assert meter.num_tokens == 4


def test_a_message_without_tokens_is_no_event_and_no_end_of_a_gap() -> None:
    meter = Meter(OBJECTIVES, 0.0)
    assert meter.take_tokens(0.25, 0) is None
    assert meter.take_tokens(0.5, 1) == Event(name=TTFT, seconds=0.5, num_tokens=1)
    assert meter.take_tokens(0.75, 0) is None
    assert meter.take_tokens(1.0, 1) == Event(name=ITL, seconds=0.5, num_tokens=1)


@pytest.mark.parametrize(
    ("first_s", "last_s", "is_good"),
    [
        (1.0, 2.0, True),
        (1.01, 1.5, False),
        (0.5, 1.6, False),
        (0.5, 1.5, True),
    ],
)
def test_a_request_is_good_if_both_objectives_were_held(
    first_s: float, last_s: float, is_good: bool
) -> None:
    meter = Meter(OBJECTIVES, 0.0)
    meter.take_tokens(first_s, 1)
    meter.take_tokens(last_s, 10)
    expected = [GENERATE, GOODPUT] if is_good else [GENERATE]
    assert names(meter.finish(last_s + 0.1)) == expected


def test_one_token_alone_has_no_time_per_token() -> None:
    meter = Meter(OBJECTIVES, 0.0)
    meter.take_tokens(0.5, 1)
    assert names(meter.finish(99.0)) == [GENERATE, GOODPUT]


def test_a_request_without_tokens_is_never_good() -> None:
    assert names(Meter(OBJECTIVES, 0.0).finish(0.1)) == [GENERATE]
