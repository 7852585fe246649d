"""What a fake worker tells of its prefix cache, over the face's own streams."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import grpc

from pdserve.cache.cache_events import CacheEventLog
from pdserve.face.cache_streams import CacheStreams
from pdserve.request import Incarnation
from pdserve.rpc.v1 import rank_pb2, worker_pb2


class FakeCache:
    """The granules of one worker, and who watches them."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.log = CacheEventLog()
        self.is_told = False
        """False: as a worker that knows no cache events."""
        self.requests: list[worker_pb2.WatchCacheRequest] = []
        self._streams = CacheStreams(incarnation, self.log, pause_s=0.0)
        self._breaks = asyncio.Event()

    def change(self, *keys: int, is_removed: bool = False) -> None:
        """Says that granules came or went."""
        self._streams.publish(
            rank_pb2.CacheChanges(
                keys=array("Q", keys).tobytes(), is_removed=bytes([is_removed]) * len(keys)
            )
        )

    def break_streams(self) -> None:
        """Cuts all streams of cache events."""
        self._breaks.set()
        self._breaks = asyncio.Event()

    async def watch(
        self, request: worker_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.CacheBatch]:
        self.requests.append(request)
        if not self.is_told:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")
        broken = asyncio.ensure_future(self._breaks.wait())
        batches = self._streams.serve(request)
        try:
            while True:
                batch = asyncio.ensure_future(anext(batches))
                await asyncio.wait((batch, broken), return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    batch.cancel()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                yield await batch
        finally:
            broken.cancel()
