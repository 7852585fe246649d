from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import pytest
import torch
from torch.distributed import DistStoreError

from pdserve.config.shape import RankPart, split_model
from pdserve.rank.gloo_groups import connect_tensor_group
from pdserve.rank.meeting import KeyBook, RelayedMeeting


def make_meetings(num_ranks: int) -> tuple[list[KeyBook], list[RelayedMeeting]]:
    """Ranks whose keys are carried to all others at once."""
    books = [KeyBook() for _ in range(num_ranks)]

    def tell_of(rank: int) -> Callable[[str, bytes], None]:
        def tell(key: str, value: bytes) -> None:
            for other, book in enumerate(books):
                if other != rank:
                    book.put(key, value)

        return tell

    return books, [RelayedMeeting(book, tell_of(rank)) for rank, book in enumerate(books)]


def test_a_key_of_one_rank_is_seen_by_all_that_share_the_name() -> None:
    _, (left, right) = make_meetings(2)
    left.store("a", 2).set("k", "v")
    assert right.store("a", 2).get("k") == b"v"
    assert left.store("a", 2).get("k") == b"v"
    assert not right.store("b", 2).check(["k"])


def test_a_wait_for_a_key_that_nobody_writes_ends() -> None:
    _, (left, _) = make_meetings(2)
    store = left.store("a", 2)
    with pytest.raises(DistStoreError, match=r"no word of a/k within 0\.01 s"):
        store.wait(["k"], timedelta(milliseconds=10))


def test_a_wait_ends_when_the_key_comes() -> None:
    books, (left, _) = make_meetings(2)
    late = Thread(target=books[0].put, args=("a/k", b"late"))
    late.start()
    assert left.store("a", 2).get("k") == b"late"
    late.join()


def test_gloo_groups_connect_over_relayed_keys() -> None:
    _, meetings = make_meetings(3)
    parts = split_model(num_layers=1, num_kv_heads=3, tensor_parallel=3, pipeline_parallel=1)
    sums: list[torch.Tensor] = []

    def work(meeting: RelayedMeeting, part: RankPart) -> None:
        group = connect_tensor_group(meeting, part, 3, "127.0.0.1")
        assert group is not None
        sums.append(group.sum(torch.tensor([float(part.rank), 1.0])))

    threads = [Thread(target=work, args=pair) for pair in zip(meetings, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found.tolist() for found in sums] == [[3.0, 3.0]] * 3
