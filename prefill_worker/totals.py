"""Totals of the prefill side have a room of their own."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class HandoffTotals:
    """Counts since start."""

    completed: int = 0
    failed: int = 0
    refused: int = 0
    leases_expired: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    latest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=4))
    """Bytes and seconds of some hand-offs sent in one go, until they are reported."""

    def note(self, num_bytes: int, seconds: float, transfer_s: float | None) -> None:
        """Counts a hand-off that has ended, and keeps how long its bytes took by themselves."""
        self.completed += 1
        self.num_bytes += num_bytes
        self.seconds += seconds
        if transfer_s is not None:
            self.latest.append((num_bytes, transfer_s))
