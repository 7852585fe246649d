from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from pdserve.rank.exchange import RankExchange, agree_on_least
from pdserve.rank.meeting import FolderMeeting

NUM_RANKS = 3


def make_exchanges(folder: Path) -> list[RankExchange]:
    meeting = FolderMeeting(folder)
    return [
        RankExchange(meeting.store("exchange", NUM_RANKS), rank, NUM_RANKS)
        for rank in range(NUM_RANKS)
    ]


def test_every_rank_learns_what_all_have_to_say(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        told = pool.map(
            lambda one: one.exchange("handles", bytes([0, 255, one.rank])), make_exchanges(tmp_path)
        )
        assert list(told) == [(b"\0\xff\0", b"\0\xff\1", b"\0\xff\2")] * NUM_RANKS


def test_topics_do_not_mix(tmp_path: Path) -> None:
    def talk(one: RankExchange) -> list[tuple[bytes, ...]]:
        return [one.exchange(topic, topic.encode()) for topic in ("a", "b")]

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        told = list(pool.map(talk, make_exchanges(tmp_path)))
    assert told == [[(b"a",) * NUM_RANKS, (b"b",) * NUM_RANKS]] * NUM_RANKS


def test_the_rank_with_the_least_counts_for_all(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        counts = pool.map(
            lambda one: agree_on_least(one, "blocks", 100 - one.rank), make_exchanges(tmp_path)
        )
        assert list(counts) == [98] * NUM_RANKS
    assert agree_on_least(None, "blocks", 7) == 7


def test_a_rank_that_never_comes_is_missed(tmp_path: Path) -> None:
    store = FolderMeeting(tmp_path).store("exchange", NUM_RANKS)
    alone = RankExchange(store, 0, NUM_RANKS)
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(RuntimeError):
        alone.exchange("handles", b"x")
