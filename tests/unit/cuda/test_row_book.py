import random

from pdserve.cuda.row_book import RowBook, Seats
from pdserve.engine.batch import SequenceSlice
from pdserve.request import BlockId, Request, RequestId, SamplingParams


def request(name: str) -> Request:
    return Request(
        request_id=RequestId(name),
        token_ids=(1,),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
    )


def part(one: Request, blocks: tuple[int, ...]) -> SequenceSlice:
    return SequenceSlice(
        request=one,
        start=0,
        token_ids=(1,),
        block_ids=tuple(BlockId(block) for block in blocks),
        output_index=0,
    )


class Tables:
    """What the device has."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[dict[int, int]] = [{} for _ in range(num_rows)]

    def take(self, seats: Seats) -> None:
        for run in seats.runs:
            for index, block in enumerate(run.block_ids, run.first):
                self.rows[run.row][index] = block


def test_a_running_sequence_keeps_its_row_and_sends_nothing_while_its_table_is_the_same() -> None:
    book = RowBook(4)
    parts = [part(request(name), (index,)) for index, name in enumerate("ab")]
    first = book.seat(parts)
    again = book.seat(parts)
    assert again.rows == first.rows
    assert again.runs == []


def test_a_new_block_is_all_that_a_grown_table_sends() -> None:
    book = RowBook(4)
    one = request("a")
    book.seat([part(one, (3, 9))])
    (run,) = book.seat([part(one, (3, 9, 5))]).runs
    assert (run.row, run.first, run.block_ids) == (0, 2, (5,))


def test_a_block_that_was_copied_before_writing_is_sent_with_all_behind_it() -> None:
    book = RowBook(4)
    one = request("a")
    book.seat([part(one, (3, 9))])
    (run,) = book.seat([part(one, (3, 7, 5))]).runs
    assert (run.first, run.block_ids) == (1, (7, 5))


def test_a_later_attempt_of_a_request_sends_its_whole_table() -> None:
    book = RowBook(4)
    book.seat([part(request("a"), (3, 9))])
    (run,) = book.seat([part(request("a"), (3, 9))]).runs
    assert (run.first, run.block_ids) == (0, (3, 9))


def test_rows_in_use_are_always_the_first_ones_and_hold_their_sequences_tables() -> None:
    numbers = random.Random(4)
    book, tables = RowBook(8), Tables(8)
    live: dict[str, tuple[Request, tuple[int, ...]]] = {}
    for step in range(400):
        for name in list(live):
            one, blocks = live[name]
            if numbers.random() < 0.15:
                del live[name]
            elif numbers.random() < 0.3:
                live[name] = (one, (*blocks, numbers.randrange(100)))
            elif numbers.random() < 0.1:
                live[name] = (one, (*blocks[:-1], numbers.randrange(100)))
        while len(live) < 8 and numbers.random() < 0.4:
            name = f"r{step}-{len(live)}"
            live[name] = (request(name), tuple(numbers.sample(range(100), numbers.randint(1, 5))))
        chosen = [one for one in live.values() if numbers.random() < 0.9]
        numbers.shuffle(chosen)
        seats = book.seat([part(one, blocks) for one, blocks in chosen])
        tables.take(seats)
        assert sorted(seats.rows) == list(range(len(chosen)))
        for (_, blocks), row in zip(chosen, seats.rows, strict=True):
            assert [tables.rows[row][index] for index in range(len(blocks))] == list(blocks)
