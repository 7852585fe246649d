"""Follows the caches of all workers, one stream a worker, and keeps the prefix index true.

A worker that cannot be followed yet, or that has no events to tell, is known from placements alone:
nothing waits for a stream. A stream that breaks is opened anew where it stood.
"""

import asyncio
import logging

import grpc

from pdserve.request import FrontId
from pdserve.rpc.v1 import worker_pb2
from router.cache_feed import CacheFeed, Taken
from router.event_queue import EventQueue
from router.policy import WorkerKey
from router.prefix_index import PrefixIndex
from router.worker_link import WorkerLink
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_FLUSH_S = 0.02
_MAX_WAITING = 1 << 16
"""Events that wait for the index; past it the streams are not read."""
_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_SYNC_S = 1.0


class CacheWatch:
    """Owns the subscriptions of one front."""

    def __init__(self, pool: WorkerPool, index: PrefixIndex, front_id: FrontId) -> None:
        """Follows nobody until `run`."""
        self._pool = pool
        self._front_id = front_id
        self._index = index
        self._queue = EventQueue(index)
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._turn = asyncio.Lock()
        """Of the stream that may fill the room: not all that wait for it may at once."""
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self.num_gaps = 0
        """Streams that had to be opened anew because something was missing."""

    @property
    def num_fed(self) -> int:
        """Workers whose own events count."""
        return sum(self._index.is_watched(key.worker_id) for key in self._tasks)

    async def run(self) -> None:
        """Follows whoever is in the pool, until cancelled."""
        flusher = asyncio.create_task(self._flush(), name="cache-flush")
        try:
            while True:
                self._follow_pool()
                await self._pool.wait_for_change(_SYNC_S)
        finally:
            tasks = [flusher, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _follow_pool(self) -> None:
        links = {link.key: link for link in self._pool.links() if link.is_alive}
        for key in [key for key in self._tasks if key not in links]:
            self._tasks.pop(key).cancel()
        for key, link in links.items():
            if key not in self._tasks:
                name = f"cache-{key.worker_id}"
                self._tasks[key] = asyncio.create_task(self._follow(link), name=name)

    async def _follow(self, link: WorkerLink) -> None:
        worker_id = link.key.worker_id
        try:
            await self._follow_life(link)
        except grpc.aio.AioRpcError:
            logger.info("worker tells nothing of its cache", extra={"worker_id": worker_id})
        except Exception:
            # One worker's messages must not end what is known of all others.
            logger.exception("cache watch failed", extra={"worker_id": worker_id})
            self._forget(link)

    async def _follow_life(self, link: WorkerLink) -> None:
        """Reads stream after stream.

        Raises:
            AioRpcError: the worker has no such stream.
        """
        feed = self._new_feed(link)
        pause_s = _PAUSE_S
        while not link.is_lost:
            since_s = asyncio.get_running_loop().time()
            try:
                await self._read(link, feed)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise
            lasted_s = asyncio.get_running_loop().time() - since_s
            pause_s = _PAUSE_S if lasted_s > pause_s else min(2 * pause_s, _MAX_PAUSE_S)
            if pause_s == _MAX_PAUSE_S and feed.next_sequence:
                # What was true seconds ago is worse than nothing: load alone decides meanwhile.
                self._forget(link)
                feed = self._new_feed(link)
            await asyncio.sleep(pause_s)

    def _new_feed(self, link: WorkerLink) -> CacheFeed:
        return CacheFeed(self._queue, link.key.worker_id, link.key.incarnation)

    def _forget(self, link: WorkerLink) -> None:
        if not link.is_lost:
            self._queue.discard(link.key.worker_id)
            self._index.forget(link.key.worker_id)

    async def _read(self, link: WorkerLink, feed: CacheFeed) -> None:
        """Reads one stream until it breaks, or tells that something is missing."""
        request = worker_pb2.WatchCacheRequest(
            front_id=self._front_id,
            epoch=link.key.incarnation,
            next_sequence=feed.next_sequence,
        )
        call = link.watch_cache(request)
        try:
            async for batch in call:
                async with self._turn:
                    await self._has_room.wait()
                    # A lost worker has been forgotten: nothing may bring it back.
                    if link.is_lost:
                        return
                    taken = feed.take(batch)
                    if self._queue.num_waiting > _MAX_WAITING:
                        self._has_room.clear()
                if taken is not Taken.FOLLOWED:
                    self.num_gaps += 1
                    extra = {"worker_id": link.key.worker_id, "why": taken.name.lower()}
                    logger.warning("cache events are missing", extra=extra)
                    return
        finally:
            call.cancel()

    async def _flush(self) -> None:
        while True:
            self._queue.flush()
            self._index.sweep()
            if self._queue.num_waiting <= _MAX_WAITING:
                self._has_room.set()
            await asyncio.sleep(0 if self._queue.num_waiting else _FLUSH_S)
