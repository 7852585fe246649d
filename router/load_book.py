"""What this router has dispatched and not seen end, written through to the fleet's rows."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from pdserve.request import RequestId
from pdserve.timeline import Clock
from router.fleet import Fleet
from router.prompt_queue import NO_TERMS, PromptQueue, Terms
from router.worker_key import WorkerKey


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCharge:
    """A sequence's part of a decode worker."""

    num_seqs: int
    kv_tokens: float
    """That it will probably hold."""
    blocks: int
    """That it may grow to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a request is charged at one worker, as one book tells another."""

    request_id: RequestId
    worker: WorkerKey
    prefill: Terms | None
    decode: DecodeCharge | None


@dataclass(slots=True)
class _Charge:
    """What a request is charged at one worker."""

    prefill: Terms | None = None
    decode: DecodeCharge | None = None


class LoadBook:
    """Counts load at dispatch, so that a burst spreads before any worker reports it."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        """Starts without charges; those of a worker that is not in the fleet wait for it."""
        self.fleet = fleet
        self._clock = clock
        self.on_room: Callable[[], None] = _do_nothing
        """Called when a prompt has left a worker's queue."""
        self._charges: dict[RequestId, dict[WorkerKey, _Charge]] = {}
        self._queues: dict[WorkerKey, PromptQueue] = {}

    @property
    def num_charged(self) -> int:
        """Requests with any charge."""
        return len(self._charges)

    def charge_prefill(self, request_id: RequestId, worker: WorkerKey, terms: Terms) -> None:
        """Queues a prompt, as terms of the predictor's law; a second charge replaces the first."""
        self.finish_prefill(request_id, worker)
        self._charge(request_id, worker).prefill = terms
        row, queue = self.fleet.row_of(worker), self._queues.get(worker)
        if queue is None:
            queue = self._queues[worker] = PromptQueue(self._chunk_tokens(row))
        queue.push(request_id, terms, self._clock.now())
        if row is None:
            return
        self.fleet.add_prompt(row, terms)
        if len(queue) == 1:
            self.fleet.set_step(row, queue.head, queue.done, queue.since_s)
        self.fleet.note_load(row)
        self.fleet.note_pick(row)

    def charge_decode(self, request_id: RequestId, worker: WorkerKey, charge: DecodeCharge) -> None:
        """Adds a sequence to a decode worker; a second charge replaces the first."""
        self._release_decode(request_id, worker)
        self._charge(request_id, worker).decode = charge
        row = self.fleet.row_of(worker)
        if row is None:
            return
        self._add_decode(row, charge, 1)
        self.fleet.note_load(row)
        self.fleet.note_pick(row)

    def charge_link(self, worker: WorkerKey, transfer_s: float | None) -> None:
        """Adds a hand-off to what a worker's link has to move; None: nobody knows how long it is.

        It counts from now on and not from when the prompt is computed: until then the link is free
        for others.
        """
        row = self.fleet.row_of(worker)
        if row is not None and transfer_s is not None:
            self.fleet.add_to_link(row, transfer_s, self._clock.now())

    def finish_prefill(self, request_id: RequestId, worker: WorkerKey) -> bool:
        """Takes a prompt off its worker's queue: it is computed, or will not be.

        Returns whether it was there.
        """
        charge = self._charges.get(request_id, {}).get(worker)
        if charge is None or charge.prefill is None:
            return False
        terms, charge.prefill = charge.prefill, None
        row, queue = self.fleet.row_of(worker), self._queues[worker]
        is_new_step = queue.pop(request_id, self._clock.now())
        if not queue:
            del self._queues[worker]
        if row is None:
            return True
        # Terms are multiples of a half: nothing is left behind when all of them are taken away.
        self.fleet.add_prompt(row, terms, -1)
        if not queue:
            self.fleet.set_step(row, NO_TERMS, NO_TERMS, 0.0)
        elif is_new_step:
            self.fleet.set_step(row, queue.head, queue.done, queue.since_s)
        self.on_room()
        return True

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> bool:
        """Releases a request from all workers but these; returns whether any was charged."""
        charges = self._charges.get(request_id)
        if charges is None:
            return False
        released = [key for key in charges if key not in workers]
        for worker in released:
            self.finish_prefill(request_id, worker)
            self._release_decode(request_id, worker)
            del charges[worker]
        if not charges:
            del self._charges[request_id]
        return bool(released)

    def workers_of(self, request_id: RequestId) -> tuple[WorkerKey, ...]:
        """Returns where a request is charged."""
        return tuple(self._charges.get(request_id, ()))

    def holdings(self) -> Iterator[Holding]:
        """Yields all charges, those of earlier requests first."""
        for request_id, charges in self._charges.items():
            for worker, charge in charges.items():
                yield Holding(
                    request_id=request_id,
                    worker=worker,
                    prefill=charge.prefill,
                    decode=charge.decode,
                )

    def adopt(self, holding: Holding) -> None:
        """Charges what another book has."""
        if holding.prefill is not None:
            self.charge_prefill(holding.request_id, holding.worker, holding.prefill)
        if holding.decode is not None:
            self.charge_decode(holding.request_id, holding.worker, holding.decode)

    def restore(self, worker: WorkerKey) -> None:
        """Charges a worker that has just joined the fleet what it was charged before."""
        row = self.fleet.row_of(worker)
        if row is None:
            return
        queue = self._queues.get(worker)
        if queue:
            for terms in queue:
                self.fleet.add_prompt(row, terms)
            queue.restart(self._chunk_tokens(row), self._clock.now())
            self.fleet.set_step(row, queue.head, queue.done, queue.since_s)
        for charges in self._charges.values():
            charge = charges.get(worker)
            if charge is not None and charge.decode is not None:
                self._add_decode(row, charge.decode, 1)
        self.fleet.note_load(row)

    def _charge(self, request_id: RequestId, worker: WorkerKey) -> _Charge:
        return self._charges.setdefault(request_id, {}).setdefault(worker, _Charge())

    def _chunk_tokens(self, row: int | None) -> float:
        return math.inf if row is None else self.fleet.chunk_tokens.item(row)

    def _release_decode(self, request_id: RequestId, worker: WorkerKey) -> None:
        charge = self._charges.get(request_id, {}).get(worker)
        if charge is None or charge.decode is None:
            return
        row = self.fleet.row_of(worker)
        if row is not None:
            self._add_decode(row, charge.decode, -1)
        charge.decode = None

    def _add_decode(self, row: int, charge: DecodeCharge, sign: int) -> None:
        self.fleet.add_sequences(
            row, sign * charge.num_seqs, sign * charge.kv_tokens, sign * charge.blocks
        )


def _do_nothing() -> None:
    """Nobody waits for room."""
