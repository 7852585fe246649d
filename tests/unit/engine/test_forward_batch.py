import pytest

from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.engine.forward_batch import build_batch
from pdserve.layers.attention import ForwardBatch, OutputRow, TileRows
from tests.support.generation import make_request, make_slice


def batch_of(*slices: SequenceSlice, block_size: int = 16) -> ForwardBatch:
    return build_batch(StepPlan(slices=slices), block_size)


def slice_of(
    num_tokens: int, start: int, end: int, blocks: list[int], num_emitted: int = 0
) -> SequenceSlice:
    tokens = list(range(100, 100 + num_tokens))
    return make_slice(make_request(tokens, num_emitted), tokens, start, end, blocks)


def test_rows_follow_the_slices_and_know_their_slots() -> None:
    batch = batch_of(slice_of(18, 14, 18, [3, 1]), slice_of(5, 0, 5, [7]))
    assert batch.token_ids.tolist() == [114, 115, 116, 117, 100, 101, 102, 103, 104]
    assert batch.positions.tolist() == [14, 15, 16, 17, 0, 1, 2, 3, 4]
    assert batch.slots.tolist() == [62, 63, 16, 17, 112, 113, 114, 115, 116]
    assert batch.sample_rows.tolist() == [3, 8]


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    assert batch_of(slice_of(18, 0, 16, [0, 1])).sample_rows.tolist() == []


def test_prompt_tokens_fall_into_tiles_of_absolute_positions() -> None:
    (sequence,) = batch_of(slice_of(200, 50, 150, list(range(13)))).sequences
    assert sequence.tiles == (
        TileRows(first_row=0, last_row=14, offset=50, num_kv=64),
        TileRows(first_row=14, last_row=78, offset=0, num_kv=128),
        TileRows(first_row=78, last_row=100, offset=0, num_kv=192),
    )
    assert sequence.outputs == ()


def test_output_tokens_are_rows_of_their_own_in_a_replay_as_in_decode() -> None:
    replay = slice_of(70, 60, 70, list(range(5)), num_emitted=4)
    (sequence,) = batch_of(replay).sequences
    assert [tile.num_kv for tile in sequence.tiles] == [64, 128]
    assert sequence.outputs == tuple(OutputRow(row=6 + i, num_kv=67 + i) for i in range(4))
    decode = slice_of(70, 69, 70, list(range(5)), num_emitted=4)
    (sequence,) = batch_of(decode).sequences
    assert sequence.tiles == ()
    assert sequence.outputs == (OutputRow(row=0, num_kv=70),)
    assert sequence.num_kv == 70


def test_blocks_in_a_run_are_viewed_and_others_gathered() -> None:
    (viewed,) = batch_of(slice_of(40, 0, 40, [4, 5, 6])).sequences
    assert viewed.first_slot == 64
    assert viewed.block_index is None
    (gathered,) = batch_of(slice_of(40, 0, 40, [4, 6, 5])).sequences
    assert gathered.first_slot is None
    assert gathered.block_index is not None
    assert gathered.block_index.tolist() == [4, 6, 5]
    assert (gathered.num_written, gathered.num_kv) == (40, 64)


def test_blocks_beyond_what_is_read_do_not_matter() -> None:
    decode = slice_of(20, 19, 20, [4, 5, 0, 9], num_emitted=1)
    (sequence,) = batch_of(decode).sequences
    assert sequence.first_slot == 64


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="needs blocks for 33 tokens, got 2 of 16"):
        batch_of(slice_of(33, 0, 33, [0, 1]))


def test_an_empty_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="empty slice"):
        batch_of(slice_of(33, 16, 16, [0, 1, 2]))
