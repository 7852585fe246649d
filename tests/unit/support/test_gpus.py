import pytest

from tests.support.gpus import deal_gpu


@pytest.mark.parametrize(
    ("visible", "num_gpus", "names"),
    [
        (None, 1, ["0", "0", "0"]),
        (None, 2, ["0", "1", "0"]),
        ("3", 1, ["3", "3", "3"]),
        ("4, 7", 2, ["4", "7", "4"]),
        ("GPU-5ebe9f43", 1, ["GPU-5ebe9f43"] * 3),
    ],
)
def test_ranks_get_the_visible_gpus_in_turn(
    visible: str | None, num_gpus: int, names: list[str]
) -> None:
    assert [deal_gpu(rank, visible, num_gpus) for rank in range(3)] == names


def test_a_visible_name_that_cuda_shows_no_gpu_for_is_dealt_to_nobody() -> None:
    assert [deal_gpu(rank, "1,9", 1) for rank in range(3)] == ["1", "1", "1"]


@pytest.mark.parametrize("visible", [None, "", "0"])
def test_without_gpus_no_rank_sees_one(visible: str | None) -> None:
    assert deal_gpu(1, visible, 0) == ""
