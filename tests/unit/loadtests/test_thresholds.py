import pytest

from loadtests.thresholds import RunFigures, Thresholds, missed

RUN = RunFigures(
    num_requests=100, num_failures=2, num_good=90, ttft_p99_ms=800.0, itl_p99_ms=70.0
)  # fmt: skip


def test_a_run_that_holds_everything_passes() -> None:
    wanted = Thresholds(
        min_requests=100,
        max_failure_share=0.02,
        min_good_share=0.9,
        max_ttft_p99_ms=800.0,
        max_itl_p99_ms=70.0,
    )
    assert missed(RUN, wanted) == []


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (Thresholds(max_failure_share=0.5, min_requests=101), "100 requests, fewer than 101"),
        (Thresholds(), "2 of 100 requests failed, more than 0.00%"),
        (
            Thresholds(max_failure_share=0.5, min_good_share=0.91),
            "90.0% of requests were good, below 91.0%",
        ),
        (
            Thresholds(max_failure_share=0.5, max_ttft_p99_ms=799.0),
            "p99 of TTFT was 800 ms, above 799 ms",
        ),
        (
            Thresholds(max_failure_share=0.5, max_itl_p99_ms=69.0),
            "p99 of ITL was 70 ms, above 69 ms",
        ),
    ],
)
def test_each_threshold_that_is_missed_is_one_line(wanted: Thresholds, line: str) -> None:
    assert missed(RUN, wanted) == [line]


def test_a_run_without_requests_fails_and_divides_by_nothing() -> None:
    nothing = RunFigures(
        num_requests=0, num_failures=0, num_good=0, ttft_p99_ms=0.0, itl_p99_ms=0.0
    )
    assert len(missed(nothing, Thresholds(min_good_share=0.5))) == 2
