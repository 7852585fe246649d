import pytest

from pdserve.cuda.step_shape import (
    ShapeChooser,
    StepShape,
    decode_buckets,
    decode_shape,
    graph_shapes,
    prompt_shape,
)

CHOOSER = ShapeChooser(graph_shapes(256, 8192))


def test_decode_batches_are_captured_in_fine_steps_and_up_to_the_limit() -> None:
    buckets = decode_buckets(256)
    assert buckets[:6] == (1, 2, 4, 8, 16, 24)
    assert buckets[-2:] == (240, 256)
    assert decode_buckets(3) == (1, 2, 3)
    assert decode_buckets(1) == (1,)
    assert decode_buckets(300)[-2:] == (288, 300)


def test_shapes_are_captured_from_the_largest_down() -> None:
    rows = [shape.num_rows for shape in graph_shapes(256, 8192)]
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize(("rows", "captured"), [(1, 1), (3, 4), (65, 80), (256, 256)])
def test_a_decode_step_takes_the_smallest_graph_that_holds_it(rows: int, captured: int) -> None:
    assert CHOOSER.choose(decode_shape(rows)) == decode_shape(captured)


def test_a_step_larger_than_all_graphs_is_computed_as_it_is() -> None:
    assert CHOOSER.choose(decode_shape(257)) is None
    assert CHOOSER.choose(prompt_shape(513, 1)) is None


def test_ranks_that_share_rows_capture_longer_prompts_with_little_padding() -> None:
    shapes = graph_shapes(256, 8192, tensor_parallel=2)
    chooser = ShapeChooser(shapes)
    assert max(shape.num_rows for shape in shapes) == 2048
    assert chooser.choose(prompt_shape(2048, 1)) == prompt_shape(2048, 8)
    assert chooser.choose(prompt_shape(1300, 2)) == prompt_shape(1536, 8)
    assert chooser.choose(prompt_shape(2049, 1)) is None
    assert max(shape.num_rows for shape in graph_shapes(256, 1000, tensor_parallel=4)) == 768


def test_few_short_prompts_share_a_graph() -> None:
    exact = StepShape(
        num_decode=0, num_prompt_rows=100, num_prompts=3, num_samples=2, max_query_tokens=60
    )
    assert CHOOSER.choose(exact) == prompt_shape(128, 8)


@pytest.mark.parametrize(("decode", "prompts", "samples"), [(1, 1, 1), (0, 9, 9), (0, 1, None)])
def test_mixed_steps_many_prompts_and_scored_prompts_have_no_graph(
    decode: int, prompts: int, samples: int | None
) -> None:
    exact = StepShape(
        num_decode=decode,
        num_prompt_rows=100,
        num_prompts=prompts,
        num_samples=samples,
        max_query_tokens=60,
    )
    assert CHOOSER.choose(exact) is None


def test_prompts_behind_many_cached_tokens_have_graphs_of_their_own() -> None:
    exact = prompt_shape(100, 2, has_long_context=True)
    assert CHOOSER.choose(exact) == prompt_shape(128, 8, has_long_context=True)


def test_without_graphs_nothing_is_chosen() -> None:
    assert ShapeChooser(()).choose(decode_shape(1)) is None
