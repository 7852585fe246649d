"""One outbound stream per router front: what the token log has for it, and load figures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pdserve.face.past_samples import PastSamples
from pdserve.face.token_log import TokenLog
from pdserve.request import FrontId, Incarnation, RequestId
from pdserve.rpc.v1 import types_pb2, worker_pb2
from pdserve.timeline import Clock

LOAD_INTERVAL_S = 0.5
"""Longest silence of a healthy stream; a router counts a multiple of it as death."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What each message says of the worker."""

    load: types_pb2.WorkerLoad
    """The latest figures."""
    is_draining: bool = False
    """It takes no new work, by order."""
    is_flipping: bool = False
    """It does so to come back in the other pool."""


class FrontStreams:
    """The streams that are open, and how long each front has been without one."""

    def __init__(
        self,
        log: TokenLog,
        incarnation: Incarnation,
        clock: Clock,
        standing: Callable[[], Standing],
    ) -> None:
        """`standing` is asked for each message."""
        self._log = log
        self._incarnation = incarnation
        self._clock = clock
        self._standing = standing
        self._past_samples = PastSamples()
        self._wakers: dict[FrontId, asyncio.Event] = {}
        self._gone_since_s: dict[FrontId, float] = {}
        self._is_ending = False
        self._has_ended = asyncio.Event()
        """While it is ending: no stream is left."""

    def publish(self, front_id: FrontId, update: worker_pb2.SequenceUpdate) -> None:
        """Logs an update and wakes the front's stream."""
        self._log.append(front_id, update)
        waker = self._wakers.get(front_id)
        if waker is not None:
            waker.set()
        else:
            self._gone_since_s.setdefault(front_id, self._clock.now())

    def remember(self, load: types_pb2.WorkerLoad) -> None:
        """Keeps samples of a report that the next one has replaced."""
        self._past_samples.add(load)

    def fill_in(self, load: types_pb2.WorkerLoad, report: int) -> None:
        """Gives a report the samples of all that came after an earlier one, its own included.

        Args:
            load: a copy of the present report.
            report: the number of the one that somebody has had last; 0: none of this life.
        """
        own = list(load.samples) if load.report > report else []
        samples = [*self._past_samples.since(report), *own]
        del load.samples[:]
        load.samples.extend(samples)

    async def serve(
        self, request: worker_pb2.StreamRequest
    ) -> AsyncIterator[worker_pb2.StreamBatch]:
        """Yields batches until the front goes away or opens another stream."""
        front_id = FrontId(request.front_id)
        waker = asyncio.Event()
        previous = self._wakers.get(front_id)
        self._wakers[front_id] = waker
        if previous is not None:
            previous.set()
        self._gone_since_s.pop(front_id, None)
        self._log.resume(front_id, list(request.resumes))
        batch = self._batch(front_id, None)
        last_report = batch.load.report
        if request.wants_past_samples:
            batch.past_samples.extend(self._past_samples)
        try:
            yield batch
            while self._wakers.get(front_id) is waker:
                if not self._log.has_news(front_id):
                    if self._is_ending:
                        return
                    try:
                        async with asyncio.timeout(LOAD_INTERVAL_S):
                            await waker.wait()
                    except TimeoutError:
                        pass  # time to send load figures
                waker.clear()
                if self._wakers.get(front_id) is waker:
                    batch = self._batch(front_id, last_report)
                    last_report = batch.load.report or last_report
                    yield batch
        finally:
            if self._wakers.get(front_id) is waker:
                del self._wakers[front_id]
                self._gone_since_s[front_id] = self._clock.now()
                if self._is_ending and not self._wakers:
                    self._has_ended.set()

    async def end(self, timeout_s: float) -> None:
        """Lets each stream say what is left and end in good order; waits for that.

        A front that hears a stream break in the midst of its last words counts its requests there
        as lost. One that does not read is left to itself after `timeout_s`.
        """
        self._is_ending = True
        if not self._wakers:
            return
        for waker in self._wakers.values():
            waker.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()

    def _batch(self, front_id: FrontId, last_report: int | None) -> worker_pb2.StreamBatch:
        """Makes a message; a report that this stream has had is not repeated with every token."""
        standing = self._standing()
        load = standing.load
        is_old = load.report != 0 and load.report == last_report
        return worker_pb2.StreamBatch(
            incarnation=self._incarnation,
            updates=self._log.take(front_id),
            load=None if is_old else load,
            is_draining=standing.is_draining,
            is_flipping=standing.is_flipping,
        )

    def take_orphans(self, grace_s: float) -> list[tuple[RequestId, int]]:
        """Returns open requests of fronts that have had no stream for `grace_s`, once."""
        limit = self._clock.now() - grace_s
        orphans: list[tuple[RequestId, int]] = []
        for front_id, since_s in list(self._gone_since_s.items()):
            if since_s < limit:
                del self._gone_since_s[front_id]
                orphans += self._log.open_requests(front_id)
        return orphans
