"""The workers this front knows: found in the registry, kept while their streams speak.

The registry is a hint. A worker that vanished from it stays as long as its stream is alive; one
that is still listed but silent is gone, and is tried again after a pause.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.errors import WorkerLost
from pdserve.predictor.predictor import Predictor
from pdserve.registry.base import Registry, RegistryUnavailable, WorkerRecord
from pdserve.request import FrontId, Role, WorkerId
from pdserve.rpc.v1 import types_pb2, worker_pb2
from pdserve.timeline import Clock, PauseWatch
from router.changes import Changes
from router.fleet import Member, Report
from router.load_book import LoadBook
from router.mismatch import find_mismatch
from router.sample_intake import observe_samples
from router.worker_key import WorkerKey
from router.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_RETRY_LOST_S = 1.0
DEPARTED_S = 120.0
"""A worker that went without a drain is remembered for so long: it may be restarting."""
FLIPPING_S = 60.0
"""One that went to come back in the other pool counts as on its way for so long."""
MAX_DEPARTED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """A worker at one instant."""

    key: WorkerKey
    is_available: bool
    """Alive, heard of lately, and not draining."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departed:
    """A worker that went and is expected back."""

    record: WorkerRecord
    is_flipping: bool
    """It is on its way to the other pool; else it died, as far as is known."""


class PoolListener(Protocol):
    """Who takes what workers say. Calls come on the event loop and must not block."""

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Takes a message of a worker's stream."""
        ...

    def on_worker_lost(self, worker: WorkerKey, why: str) -> None:
        """Takes note that a worker is dead to this router."""
        ...

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        """Returns what a new stream to this worker must resume."""
        ...


class WorkerPool:
    """Owns all links of one front."""

    def __init__(
        self,
        registry: Registry,
        front_id: FrontId,
        book: LoadBook,
        clock: Clock,
        *,
        silence_s: float,
        max_message_bytes: int,
        predictor: Predictor | None = None,
    ) -> None:
        """Knows nobody until `poll` was called; without a predictor nobody learns from steps."""
        self.book = book
        self._fleet = book.fleet
        self._predictor = predictor
        self.changes = Changes()
        """Of who is here, and who takes work."""
        self.has_prefill_pool = False
        """True from the first prefill worker on: without one, requests then wait."""
        self._registry = registry
        self._front_id = front_id
        self._clock = clock
        self._silence_s = silence_s
        self._max_message_bytes = max_message_bytes
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._retry_at_s: dict[WorkerKey, float] = {}
        self._departed: dict[WorkerId, tuple[Departed, float]] = {}
        """Workers that are gone, and since when."""
        self._closing: set[asyncio.Task[None]] = set()
        self._listener: PoolListener | None = None
        self._is_registry_lost = False

    def listen(self, listener: PoolListener) -> None:
        """Names the one who is told; called once, before the first poll."""
        self._listener = listener

    async def run(self, poll_s: float) -> None:
        """Polls the registry and watches for silence, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_silence(poll_s))
            while True:
                try:
                    await self.poll()
                except Exception:
                    # A record that cannot be read must not blind the router for good.
                    logger.exception("registry poll failed")
                await asyncio.sleep(poll_s)

    async def _watch_silence(self, pause_s: float) -> None:
        """Apart from the registry, whose answer may take seconds."""
        own_pause = PauseWatch(pause_s + self._silence_s / 2, self._clock.now())
        while True:
            await asyncio.sleep(pause_s)
            self.drop_silent(own_pause)

    def drop_silent(self, own_pause: PauseWatch) -> None:
        """Declares workers dead that were not heard for too long, unless this process stood still.

        Args:
            own_pause: of whoever calls this again and again.
        """
        if own_pause.look(self._clock.now()):
            logger.warning("this process stood still")
            return
        for link in list(self._links.values()):
            silence_s = link.silence_s()
            if silence_s > self._silence_s:
                link.lose(f"silent for {silence_s:.1f} s")

    async def poll(self) -> None:
        """Reads the registry once."""
        try:
            records = await self._registry.list_workers()
        except RegistryUnavailable:
            if not self._is_registry_lost:
                logger.warning("registry unavailable, keeping the known workers")
            self._is_registry_lost = True
            return
        if self._is_registry_lost:
            logger.info("registry is back")
        self._is_registry_lost = False
        self._take_records(records)

    async def close(self) -> None:
        """Closes all links."""
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    def views(self) -> list[WorkerView]:
        """Returns who is here, and who of them takes new work, as of now."""
        now_s = self._clock.now()
        usable = {
            self._fleet.keys[row]
            for role in Role
            for row in self._fleet.usable(role, (), now_s).nonzero()[0].tolist()
        }
        return [WorkerView(key=key, is_available=key in usable) for key in self._links]

    def links(self) -> Iterable[WorkerLink]:
        """Returns all links, sorted by worker id."""
        return [self._links[key] for key in sorted(self._links)]

    def departed(self) -> list[Departed]:
        """Returns workers that went a while ago and have not come back."""
        now_s = self._clock.now()
        return [
            replace(one, is_flipping=one.is_flipping and now_s < since_s + FLIPPING_S)
            for one, since_s in self._departed.values()
            if now_s < since_s + DEPARTED_S
        ]

    def _note_departed(self, link: WorkerLink) -> None:
        if link.is_draining and not link.is_flipping:
            return
        while len(self._departed) >= MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]
        departed = Departed(record=link.record, is_flipping=link.is_flipping)
        self._departed[link.record.worker_id] = (departed, self._clock.now())

    def knows(self, worker: WorkerKey) -> bool:
        """Says whether a worker is here."""
        return worker in self._links

    def link(self, worker: WorkerKey) -> WorkerLink:
        """Returns a worker's link.

        Raises:
            WorkerLost: it is gone.
        """
        link = self._links.get(worker)
        if link is None:
            raise WorkerLost(f"worker {worker.worker_id} is gone")
        return link

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus output that every live worker can hold; None while there is none."""
        lengths = (link.record.max_model_len for link in self._links.values() if link.is_alive)
        return min(lengths, default=None)

    def num_available(self, role: Role) -> int:
        """Returns how many workers of a pool take new work."""
        return sum(link.is_available and link.record.role is role for link in self._links.values())

    @property
    def dtype(self) -> str:
        """The data type that workers compute in, as they registered it; empty before the first."""
        for link in self._links.values():
            for pair in link.record.geometry.split():
                name, _, value = pair.partition("=")
                if name == "dtype":
                    return value
        return ""

    @property
    def can_serve(self) -> bool:
        """A request could be placed now."""
        has_prefill = not self.has_prefill_pool or self.num_available(Role.PREFILL) > 0
        return has_prefill and self.num_available(Role.DECODE) > 0

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when a worker came, went or changed, or after the time-out."""
        await self.changes.wait(self.changes.count, timeout_s)

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Hands a message on."""
        assert self._listener is not None
        self._fleet.hear(worker, self._clock.now())
        link = self._links.get(worker) if batch.past_samples else None
        if link is not None:
            # Once a stream; most messages bring a token, and nothing else.
            self._learn(link.record, batch.past_samples)
        if batch.HasField("load"):
            self._take_load(worker, batch.load)
        self._listener.on_batch(worker, batch)

    def on_link_changed(self, worker: WorkerKey) -> None:
        """Wakes all who wait for a worker."""
        link = self._links[worker]
        self._fleet.hear(worker, self._clock.now())
        self._fleet.set_available(worker, is_available=link.is_available)
        extra = {"worker_id": worker.worker_id, "is_draining": link.is_draining}
        logger.info("worker available" if link.is_available else "worker changed", extra=extra)
        self.changes.note()

    def on_link_lost(self, worker: WorkerKey, why: str) -> None:
        """Drops a link and tells of the death."""
        assert self._listener is not None
        link = self._links.pop(worker, None)
        if link is None:
            return
        self._retry_at_s[worker] = self._clock.now() + _RETRY_LOST_S
        self._note_departed(link)
        self._fleet.leave(worker)
        closing = asyncio.create_task(link.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._listener.on_worker_lost(worker, why)
        self.changes.note()

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        """Asks the listener."""
        assert self._listener is not None
        return self._listener.resumes_for(worker)

    def _learn(self, record: WorkerRecord, samples: Iterable[types_pb2.StepSample]) -> None:
        if self._predictor is not None:
            observe_samples(self._predictor, record.worker_class, record.incarnation, samples)

    def _take_load(self, worker: WorkerKey, load: types_pb2.WorkerLoad) -> None:
        link = self._links.get(worker)
        # A stream that was opened anew repeats the last report.
        if link is None or load.report == link.last_report:
            return
        link.last_report = load.report
        record = link.record
        self._learn(record, load.samples)
        is_prefill = link.record.role is Role.PREFILL
        report = Report(
            num_queued=load.num_waiting + (load.num_running if is_prefill else 0),
            queued_tokens=load.queued_tokens,
            num_running=0 if is_prefill else load.num_running,
            kv_tokens=0 if is_prefill else load.active_blocks * link.record.block_size,
        )
        self._fleet.take_report(worker, report)

    def _take_records(self, records: tuple[WorkerRecord, ...]) -> None:
        listed = set()
        now_s = self._clock.now()
        for record in records:
            key = WorkerKey(worker_id=record.worker_id, incarnation=record.incarnation)
            listed.add(key)
            self.has_prefill_pool = self.has_prefill_pool or record.role is Role.PREFILL
            link = self._links.get(key)
            if link is not None:
                self._refresh(link, record)
                continue
            for other in [old for old in self._links if old.worker_id == key.worker_id]:
                self._links[other].lose("replaced by a new incarnation")
            if now_s >= self._retry_at_s.get(key, now_s):
                self._open_link(record)
        self._retry_at_s = {key: at for key, at in self._retry_at_s.items() if key in listed}
        for key, link in list(self._links.items()):
            if key not in listed and not link.is_alive:
                link.lose("no longer registered")

    def _refresh(self, link: WorkerLink, record: WorkerRecord) -> None:
        was_available = link.is_available
        link.record = record
        if link.is_available != was_available:
            self.on_link_changed(link.key)

    def _warn_of_mismatch(self, record: WorkerRecord) -> None:
        """Tells, once for each new worker, why workers of the other pool are of no use to it."""
        for link in self._links.values():
            if link.record.role is record.role:
                continue
            detail = find_mismatch(record, link.record)
            if detail is not None:
                ids = {"worker_id": record.worker_id, "other_id": link.record.worker_id}
                logger.warning("workers cannot be paired", extra={**ids, "differing": detail})

    def _open_link(self, record: WorkerRecord) -> None:
        self._warn_of_mismatch(record)
        link = WorkerLink(
            record,
            self._front_id,
            self,
            self._clock,
            max_message_bytes=self._max_message_bytes,
            learns=self._predictor is not None,
        )
        self._links[link.key] = link
        self._fleet.join(_member_of(record))
        self.book.restore(link.key)
        self._departed.pop(record.worker_id, None)
        link.start()


def _member_of(record: WorkerRecord) -> Member:
    return Member(
        key=WorkerKey(worker_id=record.worker_id, incarnation=record.incarnation),
        role=record.role,
        digest=record.compatibility_digest,
        worker_class=record.worker_class,
        total_blocks=record.total_blocks,
        block_size=record.block_size,
        max_num_seqs=record.max_num_seqs,
        chunk_tokens=record.max_num_batched_tokens,
        kv_bytes_per_token=record.kv_bytes_per_token,
    )
