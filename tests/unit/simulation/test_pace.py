import pytest

from pdserve.engine.batch import SequenceSlice
from pdserve.predictor.profile import Profile
from simulation.pace import Pace, RunTime
from tests.support.scheduling import make_request

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.01, 0.001, 0.0),
    decode=(0.02, 0.001, 0.0001),
    transfer=(0.0, 0.0),
    kv_bytes_per_token=1,
    kv_tokens=1000,
)


@pytest.mark.parametrize("growth_s", [0.0, 1e-6, 0.003])
def test_a_run_takes_as_long_as_its_steps(growth_s: float):
    run = RunTime(0.01, growth_s)
    steps = [0.01 + i * growth_s for i in range(50)]
    for count in range(51):
        assert run.total_s(count) == pytest.approx(sum(steps[:count]))
    assert run.after(7).first_s == pytest.approx(steps[7])


@pytest.mark.parametrize("growth_s", [0.0, 1e-6, 0.003])
def test_steps_within_a_time_are_those_that_have_ended(growth_s: float):
    run = RunTime(0.01, growth_s)
    for tenth in range(400):
        seconds = tenth * 0.0017
        ended = max(n for n in range(31) if run.total_s(n) <= seconds)
        assert run.num_within(seconds, 30) == ended
    for count in range(30):
        assert run.num_within(run.total_s(count), 30) == count


def test_a_run_follows_the_decode_law_and_how_slow_the_worker_is():
    pace = Pace(PROFILE)
    run = pace.run_time(4, 100)
    for step in range(5):
        now = run.total_s(step + 1) - run.total_s(step)
        assert now == pytest.approx(PROFILE.decode_step_s(4, 100 + 4 * step))
    pace.slowness = 3.0
    assert pace.run_time(4, 100).first_s == pytest.approx(3 * run.first_s)


def slice_of(start: int, count: int, *, samples: bool) -> SequenceSlice:
    return SequenceSlice(
        request=make_request("a", 8),
        start=start,
        token_ids=(1,) * count,
        block_ids=(),
        output_index=0 if samples else None,
    )


def test_a_mixed_step_pays_its_fixed_part_once():
    pace = Pace(PROFILE)
    chunk, running = slice_of(0, 10, samples=False), slice_of(9, 1, samples=True)
    assert pace.step_s([chunk]) == pytest.approx(0.01 + 10 * 0.001)
    assert pace.step_s([running]) == pytest.approx(0.02 + 0.001 + 10 * 0.0001)
    assert pace.step_s([chunk, running]) == pytest.approx(0.02 + 0.01 + 0.001 + 0.001)


def test_steps_of_a_run_add_up_to_its_time() -> None:
    time = RunTime(0.02, 0.0001)
    assert sum(time.step_s(index) for index in range(50)) == pytest.approx(time.total_s(50))
