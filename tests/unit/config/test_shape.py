import pytest

from pdserve.config.shape import check_parallel, split_evenly, split_kv_heads, split_model
from pdserve.errors import ConfigError


def test_the_first_parts_get_what_does_not_divide() -> None:
    assert split_evenly(7, 3) == (range(3), range(3, 5), range(5, 7))
    assert split_evenly(2, 4) == (range(1), range(1, 2), range(2, 2), range(2, 2))


@pytest.mark.parametrize(("count", "num_parts"), [(1, 1), (9, 2), (30, 4), (576, 3), (5, 7)])
def test_parts_follow_one_another_and_cover_everything(count: int, num_parts: int) -> None:
    parts = split_evenly(count, num_parts)
    assert [index for part in parts for index in part] == list(range(count))
    assert len(parts) == num_parts


def test_more_ranks_than_kv_heads_hold_a_head_together() -> None:
    assert split_kv_heads(2, 4) == (range(1), range(1), range(1, 2), range(1, 2))


def test_ranks_are_numbered_stage_by_stage() -> None:
    parts = split_model(num_layers=3, num_kv_heads=4, tensor_parallel=2, pipeline_parallel=2)
    assert [part.rank for part in parts] == [0, 1, 2, 3]
    assert [(part.stage, part.tensor_rank) for part in parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [part.layers for part in parts] == [range(2), range(2), range(2, 3), range(2, 3)]
    assert parts[1].kv_heads == parts[3].kv_heads == range(2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        ({"pipeline_parallel": 0}, "pipeline_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 2}, "tensor_parallel must divide the 3 KV heads or be a multiple"),
        ({"tensor_parallel": 4}, "tensor_parallel must divide the 3 KV heads or be a multiple"),
        ({"tensor_parallel": 6}, "tensor_parallel must divide the 9 heads, got 6"),
        ({"pipeline_parallel": 3}, "pipeline_parallel must be at most the 2 layers, got 3"),
    ],
)
def test_A15_sizes_that_do_not_fit_are_refused_by_the_name_of_their_field(
    change: dict[str, int], message: str
) -> None:
    sizes = {"tensor_parallel": 1, "pipeline_parallel": 1} | change
    with pytest.raises(ConfigError, match=message):
        check_parallel(num_layers=2, num_kv_heads=3, num_heads=9, **sizes)


@pytest.mark.parametrize("tensor_parallel", [1, 3, 9])
def test_divisors_and_multiples_of_the_kv_heads_fit(tensor_parallel: int) -> None:
    check_parallel(
        num_layers=2,
        num_kv_heads=3,
        num_heads=9,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=2,
    )
