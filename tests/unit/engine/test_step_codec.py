from dataclasses import replace

from pdserve.engine.batch import StepPlan
from pdserve.engine.forward_batch import build_batch
from pdserve.engine.step_codec import plan_from_wire, plan_to_wire
from pdserve.request import BlockId
from tests.support.generation import make_request, make_slice

TOKENS = tuple(range(100, 170))
PLAN = StepPlan(
    slices=(
        make_slice(make_request(TOKENS, 6, "a"), TOKENS, 30, 70, (4, 2, 0, 1, 3)),
        make_slice(make_request(TOKENS, 0, "b"), TOKENS, 0, 20, (9, 8)),
    ),
    copies=((BlockId(1), BlockId(7)),),
)


def test_another_rank_lays_the_same_rows_out() -> None:
    again = plan_from_wire(plan_to_wire(PLAN))
    mine, theirs = build_batch(PLAN, 16), build_batch(again, 16)
    assert theirs.token_ids.tolist() == mine.token_ids.tolist()
    assert theirs.positions.tolist() == mine.positions.tolist()
    assert theirs.slots.tolist() == mine.slots.tolist()
    assert theirs.sample_rows.tolist() == mine.sample_rows.tolist() == [39]
    for mine_rows, their_rows in zip(mine.sequences, theirs.sequences, strict=True):
        assert (their_rows.tiles, their_rows.outputs) == (mine_rows.tiles, mine_rows.outputs)
    assert again.copies == PLAN.copies


def test_a_slice_that_samples_output_0_is_not_one_that_does_not_sample() -> None:
    part = replace(PLAN.slices[1], output_index=0)
    (again,) = plan_from_wire(plan_to_wire(StepPlan(slices=(part,)))).slices
    assert again.output_index == 0
    (silent,) = plan_from_wire(plan_to_wire(StepPlan(slices=(PLAN.slices[1],)))).slices
    assert silent.output_index is None
