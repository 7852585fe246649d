"""Which rows of ids a step reads of those that recent steps wrote."""

import pytest

from pdserve.cuda.awaited import AwaitedIds
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId, RequestId
from tests.support.scheduling import make_request


def plan_of(*names: str) -> StepPlan:
    return StepPlan(
        slices=tuple(
            SequenceSlice(
                request=make_request(name, 1),
                start=1,
                token_ids=(),
                block_ids=(BlockId(0),),
                output_index=1,
                awaits_token=True,
            )
            for name in names
        )
    )


def rows(*names: str) -> list[tuple[RequestId, int]]:
    return [(RequestId(name), row) for row, name in enumerate(names)]


def test_a_lone_gpu_knows_the_rows_of_the_step_before_and_no_others():
    awaited = AwaitedIds(1, 8)
    awaited.note(1, rows("a", "b"))
    assert awaited.indices == {"a": 0, "b": 1}
    awaited.note(2, rows("b"))
    assert awaited.indices == {"b": 0}


def test_steps_of_a_pipeline_have_rows_of_their_own():
    awaited = AwaitedIds(4, 8)
    awaited.note(1, rows("a", "b"))
    awaited.note(2, rows("c"))
    assert awaited.indices == {"a": 8, "b": 9, "c": 16}


def test_the_newest_token_of_a_request_counts():
    awaited = AwaitedIds(4, 8)
    awaited.note(1, rows("a"))
    awaited.note(2, rows("b", "a"))
    assert awaited.indices["a"] == 17
    assert awaited.newest(plan_of("a")) == 2


def test_a_step_awaits_the_last_of_those_it_needs():
    awaited = AwaitedIds(4, 8)
    awaited.note(1, rows("a"))
    awaited.note(2, rows("b"))
    assert awaited.newest(plan_of("a")) == 1
    assert awaited.newest(plan_of("b", "a")) == 2


def test_a_step_that_awaits_nothing_says_so():
    known = SequenceSlice(
        request=make_request("a", 1),
        start=0,
        token_ids=(3,),
        block_ids=(BlockId(0),),
        output_index=0,
    )
    assert AwaitedIds(4, 8).newest(StepPlan(slices=(known,))) is None


@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_was_overwritten_is_forgotten(num_steps: int):
    awaited = AwaitedIds(num_steps, 8)
    awaited.note(1, rows("a"))
    for number in range(2, 2 + num_steps):
        assert "a" in awaited.indices
        awaited.note(number, rows("b"))
    assert awaited.indices.keys() == {"b"}
