import pytest

from pdserve.errors import ConfigError
from pdserve.face.rank_gpus import deal_gpus


def test_each_rank_gets_the_next_of_the_visible_gpus() -> None:
    assert deal_gpus("3,1", 2) == ("3", "1")
    assert deal_gpus(" GPU-8f2a , 5,6", 2) == ("GPU-8f2a", "5")


def test_without_a_limit_ranks_count_from_the_first_gpu() -> None:
    assert deal_gpus(None, 3) == ("0", "1", "2")


@pytest.mark.parametrize(("visible", "num"), [("7", 1), ("", 0)])
def test_too_few_visible_gpus_are_refused_with_both_numbers(visible: str, num: int) -> None:
    with pytest.raises(ConfigError, match=f"2 ranks need a GPU each, .* shows {num} "):
        deal_gpus(visible, 2)
