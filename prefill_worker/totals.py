"""Totals of the prefill side have a room of their own."""

from dataclasses import dataclass


@dataclass(slots=True)
class HandoffTotals:
    """Counts since start."""

    completed: int = 0
    failed: int = 0
    refused: int = 0
    leases_expired: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
