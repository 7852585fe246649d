"""Charges outlive a worker's absence, and go from one book to another."""

from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.fleet import Fleet, Member
from router.load_book import DecodeCharge, LoadBook
from router.worker_key import WorkerKey

D0 = WorkerKey(WorkerId("d0"), Incarnation(1))
CHARGE = DecodeCharge(num_seqs=1, kv_tokens=70.0, blocks=9)
A, B = RequestId("a"), RequestId("b")


def _member() -> Member:
    return Member(
        key=D0,
        role=Role.DECODE,
        digest=b"",
        worker_class="c",
        total_blocks=100,
        block_size=16,
    )


def _load(book: LoadBook) -> tuple[list[float], list[float], float, float]:
    row = book.fleet.row_of(D0)
    fleet = book.fleet
    queue, head = fleet.queue[:, row].tolist(), fleet.head[:, row].tolist()
    return queue, head, float(fleet.num_seqs[row]), float(fleet.blocks[row])


def _charged() -> LoadBook:
    book = LoadBook(Fleet(), ManualClock())
    book.charge_prefill(A, D0, (1.0, 10.0, 50.0))
    book.charge_prefill(B, D0, (1.0, 20.0, 200.0))
    book.charge_decode(A, D0, CHARGE)
    return book


def test_what_a_worker_is_charged_before_it_is_known_counts_when_it_joins() -> None:
    book = _charged()
    book.fleet.join(_member())
    book.restore(D0)
    assert _load(book) == ([2.0, 30.0, 250.0], [1.0, 10.0, 50.0], 1.0, 9.0)
    for request_id in (A, B):
        book.keep_only(request_id, ())
    assert _load(book) == ([0.0] * 3, [0.0] * 3, 0.0, 0.0)
    assert book.num_charged == 0


def test_a_worker_that_was_away_for_a_moment_has_what_was_not_given_back() -> None:
    book = LoadBook(Fleet(), ManualClock())
    book.fleet.join(_member())
    book.charge_decode(A, D0, CHARGE)
    book.charge_decode(B, D0, CHARGE)
    book.fleet.leave(D0)
    book.keep_only(A, ())
    book.fleet.join(_member())
    book.restore(D0)
    assert _load(book)[2:] == (1.0, 9.0)
    book.keep_only(B, ())
    assert _load(book)[2:] == (0.0, 0.0)


def test_another_book_that_adopts_all_holdings_is_equal() -> None:
    book = _charged()
    other = LoadBook(Fleet(), ManualClock())
    other.fleet.join(_member())
    for holding in book.holdings():
        other.adopt(holding)
    book.fleet.join(_member())
    book.restore(D0)
    assert _load(other) == _load(book)
    assert list(other.holdings()) == list(book.holdings())


def test_it_says_whether_anything_was_given_back() -> None:
    book = _charged()
    assert book.finish_prefill(A, D0)
    assert not book.finish_prefill(A, D0)
    assert not book.keep_only(A, (D0,))
    assert book.keep_only(A, ())
    assert not book.keep_only(A, ())
