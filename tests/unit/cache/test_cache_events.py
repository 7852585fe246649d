from pdserve.cache.cache_events import CacheEventLog
from pdserve.cache.cached_granules import GranuleChange


def _stored(*keys: int) -> list[GranuleChange]:
    return [GranuleChange(key, is_removed=False) for key in keys]


def _removed(*keys: int) -> list[GranuleChange]:
    return [GranuleChange(key, is_removed=True) for key in keys]


def test_events_are_read_from_any_number_on_in_bounded_pieces():
    log = CacheEventLog(8)
    log.append([*_stored(11, 12, 13), *_removed(12)])
    piece = log.read(2, max_piece=2)
    assert (piece.first_sequence, piece.keys.tolist()) == (2, [12, 13])
    rest = log.read(4)
    assert (rest.keys.tolist(), rest.is_removed.tolist()) == ([12], [True])
    assert log.next_sequence == 5
    assert log.read(5).keys.tolist() == []


def test_what_the_ring_let_go_of_cannot_be_read():
    log = CacheEventLog(4)
    log.append(_stored(1, 2, 3, 4, 5, 6))
    assert [log.has(sequence) for sequence in (0, 1, 2, 3, 7, 8)] == [False] * 3 + [
        True,
        True,
        False,
    ]
    assert log.read(3).keys.tolist() == [3, 4, 5, 6]


def test_a_snapshot_comes_in_pieces_and_names_the_next_event():
    log = CacheEventLog(4)
    log.append([*_stored(1, 2, 3, 4, 5, 6), *_removed(2)])
    pieces = log.snapshot(max_piece=2)
    log.append(_stored(9))
    found = list(pieces)
    assert [piece.keys.tolist() for piece in found] == [[1, 3], [4, 5], [6]]
    assert {piece.first_sequence for piece in found} == {8}
    assert [(p.snapshot_index, p.is_last) for p in found] == [
        (0, False),
        (1, False),
        (2, True),
    ]


def test_a_snapshot_of_nothing_is_one_piece():
    (piece,) = CacheEventLog().snapshot()
    assert (piece.keys.tolist(), piece.snapshot_index, piece.is_last) == ([], 0, True)


def test_after_a_clear_nobody_can_go_on_from_before_it():
    log = CacheEventLog()
    log.append(_stored(1, 2))
    position = log.next_sequence
    log.clear()
    assert not log.has(position)
    assert [piece.keys.tolist() for piece in log.snapshot()] == [[]]
    log.append(_stored(3))
    assert log.read(log.next_sequence - 1).keys.tolist() == [3]
