"""Turns what a scheduler knows of itself into the figures of a heartbeat."""

from pdserve.engine.scheduler import SchedulerLedger, SchedulerLoad
from pdserve.rpc.v1 import types_pb2


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
