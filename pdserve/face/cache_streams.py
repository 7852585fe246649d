"""Tells routers what this worker's prefix cache holds: one stream a front, over one shared log."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import numpy as np

from pdserve.cache.cache_events import CacheEventLog, CachePiece
from pdserve.cache.cached_granules import GranuleChange
from pdserve.request import Incarnation
from pdserve.rpc.v1 import rank_pb2, worker_pb2

PAUSE_S = 0.1
"""Between two messages of a stream that is up to date: a router of 1,000 workers takes 10,000
messages a second at most, and its own placements tell it what comes before then."""


class CacheStreams:
    """The log of one worker's cache events, and those who follow it."""

    def __init__(
        self, epoch: Incarnation, log: CacheEventLog | None = None, pause_s: float = PAUSE_S
    ) -> None:
        """Nothing is cached."""
        self._epoch = epoch
        self._log = CacheEventLog() if log is None else log
        self._pause_s = pause_s
        self._changed = asyncio.Event()

    def publish(self, changes: rank_pb2.CacheChanges) -> None:
        """Takes what rank 0 tells of a turn."""
        keys = array("Q")
        keys.frombytes(changes.keys)
        pairs = zip(keys, changes.is_removed, strict=True)
        self._log.append([GranuleChange(key, bool(is_removed)) for key, is_removed in pairs])
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(
        self, request: worker_pb2.WatchCacheRequest
    ) -> AsyncIterator[worker_pb2.CacheBatch]:
        """Yields a snapshot, if one is needed, and then events, until the front goes away."""
        log = self._log
        sequence = request.next_sequence if request.epoch == self._epoch else 0
        while True:
            if not log.has(sequence):
                for piece in log.snapshot():
                    yield encode_piece(self._epoch, piece)
                    sequence = piece.first_sequence
            elif sequence == log.next_sequence:
                await self._changed.wait()
            else:
                piece = log.read(sequence)
                yield encode_piece(self._epoch, piece)
                sequence += len(piece.keys)
                if sequence == log.next_sequence:
                    await asyncio.sleep(self._pause_s)


def encode_piece(epoch: Incarnation, piece: CachePiece) -> worker_pb2.CacheBatch:
    """Returns the message for events or a part of a snapshot."""
    batch = worker_pb2.CacheBatch(
        epoch=epoch, first_sequence=piece.first_sequence, keys=piece.keys.tolist()
    )
    if piece.is_removed.any():
        batch.is_removed = piece.is_removed.astype(np.uint8).tobytes()
    if piece.snapshot_index is not None:
        batch.snapshot.index = piece.snapshot_index
        batch.snapshot.is_last = piece.is_last
    return batch
