import torch

from pdserve.cuda.traffic_rows import MAX_ROW_WORDS, NUM_ROWS, SumRows, UploadRows

CPU = torch.device("cpu")
NO_STREAM = 0


class Mark:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_ids_arrive_and_rows_are_used_in_turn_once_nothing_needs_them() -> None:
    rows, marks = UploadRows(CPU), [Mark() for _ in range(2 * NUM_ROWS)]
    for number, mark in enumerate(marks):
        ids = list(range(number, number + 5))
        assert rows.upload(ids, NO_STREAM)[:5].tolist() == ids
        rows.note_used(mark)
    assert [mark.num_waits for mark in marks] == [1] * NUM_ROWS + [0] * NUM_ROWS


def test_more_ids_than_a_row_holds_travel_alone() -> None:
    ids = list(range(MAX_ROW_WORDS + 1))
    assert UploadRows(CPU).upload(ids, NO_STREAM).tolist() == ids


def test_each_frame_has_a_row_of_sums_for_as_long_as_there_are_rows() -> None:
    rows, taken = SumRows(CPU, 3), []
    for number in range(3 * NUM_ROWS):
        row = rows.take()
        row[:2] = torch.tensor([[number, 2**30], [1, number]])
        row[2] = -1  # of another frame, which had more programs
        taken.append(rows.sums(2))
        if number >= NUM_ROWS - 1:
            index = number - NUM_ROWS + 1
            assert taken[index].value() == (2**30 + index) << 32 | (index + 1)


def test_sums_may_wrap_around_and_be_negative() -> None:
    rows = SumRows(CPU, 2)
    rows.take()[:] = torch.tensor([[-5, 2**62], [-1, 2**62 - 10]])
    assert rows.sums(2).value() == ((2**63 - 10) & 0xFFFFFFFF) << 32 | (2**32 - 6)
