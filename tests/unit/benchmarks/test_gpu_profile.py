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
    assert [(one.name, one.us, one.adds_us, one.launches) for one in found.kernels] == [
        ("product", 80, 80, 2),
        ("norm", 20, 10, 1),
        (STEP_KERNEL, 5, 5, 1),
    ]


def test_waiting_for_the_kernel_before_adds_nothing_to_a_step() -> None:
    work = [
        Interval(STEP_KERNEL, 0, 5),
        Interval("product", 5, 60),
        Interval("norm", 6, 63),
    ]
    steps = [
        Interval(one.name, one.start + 100 * index, one.end + 100 * index)
        for index in range(4)
        for one in work
    ]
    added = {one.name: one.adds_us for one in summarize(steps, num_skipped=1).kernels}
    assert added == {"product": 55, "norm": 3, STEP_KERNEL: 5}


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 steps, got 3"):
        summarize([one for index in range(3) for one in step(100 * index)], num_skipped=1)
