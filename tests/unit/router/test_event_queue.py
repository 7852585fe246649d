"""Events on their way to the index: what one turn takes is bounded, and order is kept."""

import numpy as np

from pdserve.request import WorkerId
from router.event_queue import MAX_BATCH, EventQueue
from router.prefix_index import PrefixIndex

A, B = WorkerId("a"), WorkerId("b")


def _queue() -> EventQueue:
    index = PrefixIndex()
    for worker_id in (A, B):
        index.begin_snapshot(worker_id)
    return EventQueue(index)


def _put(queue: EventQueue, worker_id: WorkerId, keys: range, *, removed: bool = False) -> None:
    queue.put(worker_id, np.array(keys, np.uint64), np.full(len(keys), removed))


def test_no_turn_takes_more_than_one_batch_however_long_a_message_is():
    queue = _queue()
    _put(queue, A, range(1, 10))
    _put(queue, B, range(1, 3 * MAX_BATCH))
    for number in range(5):
        _put(queue, A, range(1, 2000 + number))
    taken = []
    while before := queue.num_waiting:
        queue.flush()
        taken.append(before - queue.num_waiting)
    assert max(taken) <= MAX_BATCH
    assert sum(taken) == 9 + 3 * MAX_BATCH - 1 + sum(1999 + number for number in range(5))
    assert len(queue.index) == 3 * MAX_BATCH - 1 + 2003


def test_a_message_that_is_cut_counts_in_its_order():
    queue = _queue()
    keys = np.repeat(np.arange(1, MAX_BATCH + 1, dtype=np.uint64), 3)
    # Each key comes, goes, and comes again.
    queue.put(A, keys, np.arange(len(keys)) % 3 == 1)
    _put(queue, A, range(5, 8), removed=True)
    while queue.num_waiting:
        queue.flush()
    assert queue.index.match([4, 5]) == {A: 1}
    assert len(queue.index) == MAX_BATCH - 3


def test_what_waits_of_a_worker_can_be_dropped():
    queue = _queue()
    _put(queue, A, range(1, 5))
    _put(queue, B, range(1, 4))
    queue.discard(A)
    assert queue.num_waiting == 3
    queue.flush()
    assert queue.index.match([1, 2, 3, 4]) == {B: 3}
