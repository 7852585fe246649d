"""Puts what a worker tells of its cache in order, and feeds it to the index. Pure.

    new --snapshot 0..n--> following --events in sequence--> following
    a gap from anywhere: the stream is to be opened anew, from `next_sequence`

Messages may come twice or late; what was taken once is not taken again, and what cannot follow is
a gap. Nothing is guessed: a snapshot that misses a part is asked for anew.
"""

from enum import Enum, auto

import numpy as np

from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.v1 import worker_pb2
from router.event_queue import EventQueue
from router.granule_table import Keys


class Taken(Enum):
    """What became of a message."""

    FOLLOWED = auto()
    GAP = auto()
    """Something is missing before it: open the stream anew."""
    WRONG_EPOCH = auto()
    """It is of another life of the worker."""


class CacheFeed:
    """One life of one worker, as one router follows it."""

    def __init__(self, queue: EventQueue, worker_id: WorkerId, epoch: Incarnation) -> None:
        """Knows nothing yet."""
        self._queue = queue
        self._worker_id = worker_id
        self._epoch = epoch
        self._next_part = 0
        self.next_sequence = 0
        """Of the first event that was not taken; 0: a snapshot is needed."""

    def take(self, batch: worker_pb2.CacheBatch) -> Taken:
        """Takes one message of the stream."""
        if batch.epoch != self._epoch:
            return Taken.WRONG_EPOCH
        keys = np.fromiter(batch.keys, np.uint64, len(batch.keys))
        if batch.HasField("snapshot"):
            return self._take_part(batch.snapshot, batch.first_sequence, keys)
        if self.next_sequence == 0 or batch.first_sequence > self.next_sequence:
            return Taken.GAP
        is_removed = np.zeros(len(keys), np.bool_)
        if batch.is_removed:
            is_removed = np.frombuffer(batch.is_removed, np.uint8) != 0
        num_known = self.next_sequence - batch.first_sequence
        if num_known < len(keys):
            self._queue.put(self._worker_id, keys[num_known:], is_removed[num_known:])
            self.next_sequence = batch.first_sequence + len(keys)
        return Taken.FOLLOWED

    def _take_part(self, part: worker_pb2.SnapshotPart, next_sequence: int, keys: Keys) -> Taken:
        if part.index == 0:
            self._queue.begin_snapshot(self._worker_id)
            self._next_part = 0
            self.next_sequence = 0
        elif self.next_sequence or part.index < self._next_part:
            return Taken.FOLLOWED
        if part.index > self._next_part:
            return Taken.GAP
        self._queue.put(self._worker_id, keys, np.zeros(len(keys), np.bool_))
        self._next_part += 1
        if part.is_last:
            self.next_sequence = next_sequence
        return Taken.FOLLOWED
