"""Turns what a scheduler knows of itself into the figures of a heartbeat."""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from pdserve.engine.scheduler import SchedulerLedger, SchedulerLoad, Stage
from pdserve.request import Request, RequestId
from pdserve.rpc.v1 import types_pb2

MAX_COMPUTING_TOLD = 16
"""A prompt of several steps fills each of them but its last: so many are never on the way at once,
unless they are short, and soon over."""


class Scheduler(Protocol):
    """Of either pool."""

    def load(self) -> SchedulerLoad:
        """Returns how busy the worker is."""
        ...

    def requests(self) -> Sequence[Request]:
        """Returns all requests here, the oldest first."""
        ...

    def stage_of(self, request_id: RequestId) -> Stage | None:
        """Returns where a request stands; None if it is not here."""
        ...


def describe_load(scheduler: Scheduler) -> types_pb2.WorkerLoad:
    """Encodes how busy a scheduler is, and whose prompts it computes."""
    wire = load_to_wire(scheduler.load())
    ids = (request.request_id for request in scheduler.requests())
    computing = (one for one in ids if scheduler.stage_of(one) is Stage.COMPUTING)
    wire.computing.extend(islice(computing, MAX_COMPUTING_TOLD))
    return wire


def load_to_wire(load: SchedulerLoad) -> types_pb2.WorkerLoad:
    """Encodes how busy a scheduler is."""
    return types_pb2.WorkerLoad(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        queued_tokens=load.queued_tokens,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        reserved_blocks=load.reserved_blocks,
        active_blocks=load.active_blocks,
    )


def ledger_to_wire(
    ledger: SchedulerLedger, *, reservations: int, leases: int, transfers: int
) -> types_pb2.Ledger:
    """Encodes what a scheduler holds, beside what the hand-offs of its worker hold."""
    return types_pb2.Ledger(
        total_blocks=ledger.total_blocks,
        free_blocks=ledger.free_blocks,
        cached_blocks=ledger.cached_blocks,
        sequences=ledger.sequences,
        held_handoffs=ledger.held_handoffs,
        reservations=reservations,
        leases=leases,
        transfers=transfers,
    )
