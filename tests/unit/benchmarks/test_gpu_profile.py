import pytest

from benchmarks.gpu_profile import STEP_KERNEL, Interval, summarize


def step(start: float) -> list[Interval]:
    """Makes one step of 100 us: 5 idle in front, then work that overlaps."""
    return [
        Interval(STEP_KERNEL, start + 5, start + 10),
        Interval("product", start + 10, start + 60),
        Interval("norm", start + 50, start + 70),
        Interval("product", start + 70, start + 100),
    ]


def test_steps_are_cut_at_their_first_kernel_and_overlaps_count_once() -> None:
    work = [one for index in range(6) for one in step(100 * index)]
    found = summarize(work, num_skipped=1)
    assert found.num_steps == 4
    assert found.step_us == pytest.approx(100)
    assert found.busy_us == pytest.approx(95)
    assert found.kernels == [("product", 80, 2), ("norm", 20, 1), (STEP_KERNEL, 5, 1)]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 steps, got 3"):
        summarize([one for index in range(3) for one in step(100 * index)], num_skipped=1)
