import numpy as np
import torch

from pdserve.cuda.device import Device
from pdserve.cuda.row_book import TableRun
from pdserve.cuda.step_inputs import (
    ALIGNMENT,
    InputLimits,
    PromptInputs,
    StepInputs,
    layout_of,
    slots_of,
)
from pdserve.cuda.step_shape import StepShape, decode_shape
from pdserve.request import BlockId

LIMITS = InputLimits(max_rows=32, max_seqs=4, max_samples=8, max_blocks=8)


def make_inputs() -> StepInputs:
    return StepInputs(LIMITS, Device(torch.device("cpu")))


def test_every_part_starts_on_sixteen_bytes_whatever_the_sizes() -> None:
    shape = StepShape(
        num_decode=3, num_prompt_rows=7, num_prompts=1, num_samples=3, max_query_tokens=7
    )
    layout = layout_of(shape)
    starts = [layout.sources, layout.positions, layout.slots, layout.lengths, layout.query_starts]
    starts += [layout.contexts, layout.sample_rows, layout.updates]
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert starts == sorted(starts)
    assert layout.positions - layout.sources >= 10


def test_padding_has_no_slot_and_no_length() -> None:
    inputs, shape = make_inputs(), decode_shape(4)
    writer = inputs.next_writer(shape)
    writer.write_decode([1, 0], [7, -3], [5, 20], [21, 4])
    inputs.send(writer)
    previous = torch.tensor([11, 12, 13], dtype=torch.int32)
    rows = inputs.take(shape, previous)
    assert rows.token_ids_M.tolist() == [13, 7, 0, 0]
    assert rows.positions_M.tolist() == [20, 5, 0, 0]
    assert rows.slots_M.tolist() == [4, 21, -1, -1]
    assert rows.decode is not None
    assert rows.decode.lengths_B.tolist() == [21, 6, 0, 0]
    assert rows.prompt is None
    assert rows.sample_rows_R is None


def test_prompts_follow_decode_rows_and_padding_prompts_are_empty() -> None:
    inputs = make_inputs()
    shape = StepShape(
        num_decode=1, num_prompt_rows=8, num_prompts=3, num_samples=3, max_query_tokens=8
    )
    writer = inputs.next_writer(shape)
    writer.write_decode([0], [9], [3], [3])
    writer.write_prompts(
        [
            PromptInputs(start=4, token_ids=(1, 2), slots=slots_of((5, 6), 4, 6, 4)),
            PromptInputs(start=0, token_ids=(3, 4, 5), slots=slots_of((1,), 0, 3, 4)),
        ]
    )
    writer.write_samples([0, 2, 5])
    writer.update_prompt_tables([TableRun(row=1, first=0, block_ids=(BlockId(1),))])
    inputs.send(writer)
    rows = inputs.take(shape, torch.zeros(4, dtype=torch.int32))
    assert rows.token_ids_M.tolist() == [9, 1, 2, 3, 4, 5, 0, 0, 0]
    assert rows.positions_M.tolist() == [3, 4, 5, 0, 1, 2, 0, 0, 0]
    assert rows.slots_M.tolist() == [3, 24, 25, 4, 5, 6, -1, -1, -1]
    assert rows.prompt is not None
    assert rows.prompt.first_row == 1
    assert rows.prompt.query_starts.tolist() == [0, 2, 5, 5]
    assert rows.prompt.context_lengths_B.tolist() == [4, 0, 0]
    assert rows.prompt.block_tables_BW[1, 0] == 1
    assert rows.sample_rows_R is not None
    assert rows.sample_rows_R.tolist() == [0, 2, 5]


def test_table_updates_reach_their_rows_and_stay() -> None:
    inputs, shape = make_inputs(), decode_shape(2)
    previous = torch.zeros(4, dtype=torch.int32)
    expected = np.zeros((2, 8), dtype=np.int32)
    numbers = np.random.default_rng(3)
    for _ in range(6):
        writer = inputs.next_writer(shape)
        runs = []
        for row in range(2):
            first, count = int(numbers.integers(0, 5)), int(numbers.integers(0, 4))
            blocks = tuple(BlockId(int(one)) for one in numbers.integers(0, 99, count))
            expected[row, first : first + count] = blocks
            if count:
                runs.append(TableRun(row=row, first=first, block_ids=blocks))
        writer.update_decode_tables(runs)
        inputs.send(writer)
        rows = inputs.take(shape, previous)
        assert rows.decode is not None
        assert rows.decode.block_tables_BW.tolist() == expected.tolist()


def test_slots_follow_the_block_table() -> None:
    assert slots_of((7, 2, 9), 3, 9, 4).tolist() == [31, 8, 9, 10, 11, 36]
    assert slots_of((7,), 0, 1, 1).tolist() == [7]
