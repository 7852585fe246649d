import pytest
import torch

from pdserve.cuda.assembly import Assembler, StepLimits
from pdserve.cuda.device import Device
from pdserve.cuda.step_inputs import InputLimits, StepInputs
from pdserve.cuda.step_shape import ShapeChooser, graph_shapes
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId, RequestId
from tests.support import generation

LIMITS = InputLimits(max_rows=64, max_seqs=4, max_samples=8, max_blocks=4)


def make_assembler(*, keeps_prompts_apart: bool = False, has_graphs: bool = False) -> Assembler:
    return Assembler(
        StepInputs(LIMITS, Device(torch.device("cpu"))),
        ShapeChooser(graph_shapes(4, 64) if has_graphs else ()),
        StepLimits(
            block_size=16,
            num_blocks=9,
            vocab_size=99,
            max_model_len=64,
            keeps_prompts_apart=keeps_prompts_apart,
        ),
        max_seqs=4,
    )


def part(
    name: str, start: int, end: int, prompt: int = 8, *, samples: bool = True
) -> SequenceSlice:
    request = generation.make_request(tuple(range(1, prompt + 1)), request_id=name)
    tokens = tuple(range(1, 40))
    return SequenceSlice(
        request=request,
        start=start,
        token_ids=tokens[start:end],
        block_ids=(BlockId(1), BlockId(2), BlockId(3)),
        output_index=end - prompt if samples else None,
    )


@pytest.mark.parametrize(("is_apart", "num_decode"), [(False, 2), (True, 1)])
def test_a_lone_token_of_a_prompt_is_a_prompt_only_where_bits_matter(
    is_apart: bool, num_decode: int
) -> None:
    assembler = make_assembler(keeps_prompts_apart=is_apart)
    step = assembler.assemble(StepPlan(slices=(part("a", 7, 8), part("b", 9, 10))), {})
    assert step.shape.num_decode == num_decode
    assert step.shape.num_prompts == 2 - num_decode


def test_slots_of_samples_say_where_their_logits_are() -> None:
    plan = StepPlan(
        slices=(part("p", 0, 5, samples=False), part("d", 9, 10), part("q", 2, 8), part("e", 8, 9))
    )
    step = make_assembler().assemble(plan, {})
    rows = {slot.part.request.request_id: slot.row for slot in step.slots}
    assert rows == {"d": 0, "e": 1, "q": 2}
    assert (step.shape.num_decode, step.shape.num_prompt_rows) == (2, 11)
    assert step.shape.num_samples == 3
    assert [chunk.num_rows for chunk in step.chunks] == [5, 6]
    assert [chunk.context for chunk in step.chunks] == [0, 2]


def test_a_decode_step_takes_a_graph_and_its_rows_are_those_of_the_tables() -> None:
    assembler = make_assembler(has_graphs=True)
    names = ("a", "b", "c")
    first = assembler.assemble(StepPlan(slices=tuple(part(name, 8, 9) for name in names)), {})
    assert first.is_captured
    assert first.shape.num_rows == 4
    again = assembler.assemble(StepPlan(slices=(part("c", 9, 10), part("b", 9, 10))), {})
    rows = {slot.part.request.request_id: slot.row for slot in again.slots}
    assert sorted(rows.values()) == [0, 1]
    assert rows[RequestId("b")] == 1
    assert again.shape.num_rows == 2
