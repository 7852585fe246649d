import pytest
import torch

from pdserve.kernels.streamed_attention import LEAST_PROGRAMS, can_stream, count_teams

MOST_TEAMS = 33
MAX_SPLITS = 128


@pytest.mark.parametrize("batch", [32, 64, 128, 256])
def test_sequences_of_equal_length_are_not_cut_if_teams_can_take_whole_ones(batch: int) -> None:
    assert batch % count_teams(MOST_TEAMS, batch, MAX_SPLITS) == 0


@pytest.mark.parametrize("batch", [2, 4, 8, 16])
def test_a_few_sequences_of_equal_length_are_cut_in_equal_parts(batch: int) -> None:
    assert count_teams(MOST_TEAMS, batch, MAX_SPLITS) % batch == 0


def test_hardly_any_program_is_given_up_for_even_cuts() -> None:
    for batch in range(1, 300):
        num_teams = count_teams(MOST_TEAMS, batch, MAX_SPLITS)
        assert LEAST_PROGRAMS * MOST_TEAMS <= num_teams <= MOST_TEAMS


def test_there_are_no_more_teams_than_pieces() -> None:
    assert count_teams(MOST_TEAMS, 3, 2) == 6


def test_without_a_device_nothing_is_streamed() -> None:
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    keys = torch.zeros(16, 2, 128, dtype=torch.bfloat16)
    assert not can_stream(q, keys, 16, 1)
