import pytest

from decode_worker.admission import StepPace, block_need, has_room
from pdserve.timeline import ManualClock


@pytest.mark.parametrize(
    ("num_tokens", "max_total_tokens", "num_table_blocks", "num_final_blocks"),
    [
        (5, 100, 3, 25),  # two blocks of prompt and one to grow into
        (8, 100, 3, 25),
        (8, 9, 2, 2),  # the only output token is never computed: no growth
        (7, 9, 2, 2),
        (8, 10, 3, 3),
        (1, 2, 1, 1),
    ],
)
def test_a_sequence_starts_with_its_tokens_and_one_block_of_growth(
    num_tokens: int, max_total_tokens: int, num_table_blocks: int, num_final_blocks: int
):
    need = block_need(num_tokens, max_total_tokens, 4)
    assert (need.num_table_blocks, need.num_final_blocks) == (num_table_blocks, num_final_blocks)


@pytest.mark.parametrize(
    ("num_available", "num_running", "num_new_blocks", "expected"),
    [(5, 0, 5, True), (5, 1, 5, False), (6, 1, 5, True), (0, 0, 0, True), (1, 2, 0, False)],
)
def test_each_running_sequence_keeps_a_block_to_grow_into(
    num_available: int, num_running: int, num_new_blocks: int, expected: bool
):
    assert has_room(num_available, num_running, num_new_blocks) is expected


def test_the_retry_hint_is_the_time_until_the_first_sequence_may_end():
    clock = ManualClock()
    pace = StepPace(clock)
    pace.begin_step()
    clock.advance(0.05)
    pace.end_step()
    assert pace.retry_hint_s([30, 10, 20]) == pytest.approx(0.5)


def test_the_retry_hint_stays_within_bounds_and_has_a_default():
    clock = ManualClock()
    pace = StepPace(clock)
    assert pace.retry_hint_s([10]) == 0.25
    pace.begin_step()
    clock.advance(1.0)
    pace.end_step()
    assert pace.retry_hint_s([]) == 0.25
    assert pace.retry_hint_s([10_000]) == 2.0
    assert pace.retry_hint_s([0]) == 0.02


def test_a_step_in_flight_behind_another_counts_from_that_one_s_end():
    clock = ManualClock()
    pace = StepPace(clock)
    pace.begin_step()
    for _ in range(5):
        pace.begin_step()
        clock.advance(0.05)
        pace.end_step()
    assert pace.retry_hint_s([10]) == pytest.approx(0.5)
