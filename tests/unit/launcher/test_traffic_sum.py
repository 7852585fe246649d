"""What routers have seen together."""

from autoscaler.figures import Traffic
from launcher.traffic_sum import TrafficSum


def seen(count: int, *, oldest_s: float = 0.0, waiting: int = 0) -> Traffic:
    return Traffic(
        num_arrived=count,
        prompt_tokens=10 * count,
        output_tokens=100 * count,
        num_waiting=waiting,
        waiting_tokens=10 * waiting,
        oldest_s=oldest_s,
        num_in_flight=waiting,
    )


def test_counts_of_routers_add_up_and_the_oldest_of_all_counts() -> None:
    total = TrafficSum()
    total.add({"a": seen(100), "b": seen(50)})
    found = total.add({"a": seen(103, oldest_s=1.0, waiting=2), "b": seen(54, oldest_s=3.0)})
    assert found == Traffic(
        num_arrived=7,
        prompt_tokens=70,
        output_tokens=700,
        num_waiting=2,
        waiting_tokens=20,
        oldest_s=3.0,
        num_in_flight=2,
    )


def test_C18_router_that_starts_anew_comes_or_goes_makes_no_spike_and_no_fall() -> None:
    total = TrafficSum()
    total.add({"a": seen(1000), "b": seen(500)})
    counts = [
        found.num_arrived
        for answers in (
            {"a": seen(1001), "b": seen(502)},
            {"a": seen(4), "b": seen(503)},
            {"b": seen(504)},
            {"b": seen(505), "c": seen(90)},
            {"a": seen(9), "b": seen(506), "c": seen(91)},
        )
        if (found := total.add(answers)) is not None
    ]
    assert counts == [3, 8, 9, 10, 17]


def test_without_any_answer_nothing_is_known() -> None:
    assert TrafficSum().add({}) is None
