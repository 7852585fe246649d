import torch

from pdserve.cuda.traffic_rows import MAX_ROW_WORDS, NUM_ROWS, SumRows, UploadRows

CPU = torch.device("cpu")


class Mark:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_ids_arrive_and_rows_are_used_in_turn_once_nothing_needs_them() -> None:
    rows, marks = UploadRows(CPU), [Mark() for _ in range(2 * NUM_ROWS)]
    for number, mark in enumerate(marks):
        ids = list(range(number, number + 5))
        assert rows.upload(ids)[:5].tolist() == ids
        rows.note_used(mark)
    assert [mark.num_waits for mark in marks] == [1] * NUM_ROWS + [0] * NUM_ROWS


def test_more_ids_than_a_row_holds_travel_alone() -> None:
    ids = list(range(MAX_ROW_WORDS + 1))
    assert UploadRows(CPU).upload(ids).tolist() == ids


def test_each_frame_gets_its_own_sums_out_of_running_totals() -> None:
    rows, taken = SumRows(CPU), []
    for number in range(3 * NUM_ROWS):
        rows.cells += torch.tensor([number, 2**31 + number])
        taken.append(rows.read())
        if number >= 4:
            # Read late: as many frames may be under way.
            index = number - 4
            assert taken[index].value() == (2**31 + index) << 32 | index


def test_sums_may_wrap_around_and_be_negative() -> None:
    rows = SumRows(CPU)
    rows.cells += torch.tensor([-5, 2**63 - 10])
    assert rows.read().value() == ((2**63 - 10) & 0xFFFFFFFF) << 32 | (2**32 - 5)
    rows.cells += torch.tensor([7, 20])
    assert rows.read().value() == 20 << 32 | 7
