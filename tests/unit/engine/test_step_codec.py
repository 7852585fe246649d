from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pdserve.engine.batch import SequenceSlice, StepPlan, is_chosen_on_device
from pdserve.engine.forward_batch import build_batch
from pdserve.engine.step_codec import PlanDecoder, PlanEncoder
from pdserve.request import BlockId, SamplingParams
from tests.support.generation import make_request, make_slice

TOKENS = tuple(range(100, 170))
PLAN = StepPlan(
    slices=(
        make_slice(make_request(TOKENS, 6, "a"), TOKENS, 30, 70, (4, 2, 0, 1, 3)),
        make_slice(make_request(TOKENS, 0, "b"), TOKENS, 0, 20, (9, 8)),
    ),
    copies=((BlockId(1), BlockId(7)),),
)


def passed_on(plans: Sequence[StepPlan], max_known: int = 9) -> Iterator[StepPlan]:
    """What another rank makes of plans."""
    encoder, decoder = PlanEncoder(max_known), PlanDecoder()
    for plan in plans:
        work = encoder.encode(plan)
        yield decoder.decode(type(work).FromString(work.SerializeToString()))


def passed_on_slices(parts: Sequence[SequenceSlice], max_known: int = 9) -> list[SequenceSlice]:
    """The same, a slice a step."""
    plans = [StepPlan(slices=(part,)) for part in parts]
    return [again.slices[0] for again in passed_on(plans, max_known)]


def test_another_rank_lays_the_same_rows_out() -> None:
    (again,) = passed_on([PLAN])
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
    again, silent = passed_on_slices([part, PLAN.slices[1]])
    assert again.output_index == 0
    assert silent.output_index is None


def test_an_awaited_token_and_prompt_targets_arrive() -> None:
    part = replace(PLAN.slices[1], token_ids=(), start=70, awaits_token=True, output_index=3)
    scored = replace(PLAN.slices[0], prompt_targets=(7, 8))
    (again,) = passed_on([StepPlan(slices=(part, scored, part))])
    assert [one.awaits_token for one in again.slices] == [True, False, True]
    assert [one.prompt_targets for one in again.slices] == [(), (7, 8), ()]
    assert again.slices[0].end == 71


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, top_k=5, top_p=0.8, min_p=0.1, seed=2**63 + 9),
        SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=2),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(logit_bias=((3, 1.5),), n=2),
        SamplingParams(logprobs=0, min_tokens=4, stop_token_ids=(5,)),
    ],
)
def test_another_rank_chooses_a_token_in_the_same_way(sampling: SamplingParams) -> None:
    request = replace(
        make_request(TOKENS, 6, "a", sampling=sampling), sample_index=3, eos_token_ids=(2, 7)
    )
    (again,) = passed_on_slices([replace(PLAN.slices[0], request=request)])
    assert again.request.sampling == sampling
    assert again.request.sample_index == 3
    assert again.request.stop_ids == request.stop_ids
    assert is_chosen_on_device(again.request) == is_chosen_on_device(request)


def test_a_request_is_told_once_and_stays_the_same_object() -> None:
    first, second = PLAN.slices[1], replace(PLAN.slices[1], start=20)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    works = [encoder.encode(StepPlan(slices=(part,))) for part in (first, second)]
    one, other = (decoder.decode(work).slices[0] for work in works)
    assert not works[1].requests
    assert not works[1].block_ids
    assert other.request is one.request
    assert other.block_ids is one.block_ids


@pytest.mark.parametrize("table", [(9, 8, 5), (9, 7), (6,), (9,), (9, 7, 5, 3)])
def test_a_table_that_grows_shrinks_or_changes_arrives_whole(table: tuple[int, ...]) -> None:
    tables = [PLAN.slices[1].block_ids, tuple(map(BlockId, table)), PLAN.slices[1].block_ids]
    parts = [replace(PLAN.slices[1], block_ids=one) for one in tables]
    assert [one.block_ids for one in passed_on_slices(parts)] == tables


def test_a_new_request_of_an_old_id_is_told_anew() -> None:
    part = PLAN.slices[1]
    other = replace(part, request=replace(part.request, sampling=SamplingParams(top_k=3)))
    first, second, third = passed_on_slices([part, other, part])
    assert [one.request.sampling.top_k for one in (first, second, third)] == [0, 3, 0]
    assert second.block_ids == part.block_ids


def test_a_request_that_was_forgotten_is_told_again() -> None:
    parts = [
        make_slice(make_request(TOKENS, 0, name), TOKENS, 0, 20, (index, 8))
        for index, name in enumerate("abcd")
    ]
    order = [parts[index] for index in (0, 1, 2, 0, 3, 1, 2, 0)]
    made = passed_on_slices(order, max_known=2)
    assert [one.request.request_id for one in made] == [one.request.request_id for one in order]
    assert [one.block_ids for one in made] == [one.block_ids for one in order]


def test_a_step_of_more_requests_than_are_remembered_forgets_none_of_its_own() -> None:
    parts = tuple(
        make_slice(make_request(TOKENS, 0, f"r{index}"), TOKENS, 0, 20, (index, 8))
        for index in range(5)
    )
    plan = StepPlan(slices=parts)
    first, second = passed_on([plan, plan], max_known=2)
    assert [one.request.request_id for one in second.slices] == [f"r{index}" for index in range(5)]
    assert all(
        one.request is other.request for one, other in zip(first.slices, second.slices, strict=True)
    )
