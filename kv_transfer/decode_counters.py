"""What a decode worker counts of its hand-offs."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecodeCounters:
    """Totals since start."""

    granted: int = 0
    refused: int = 0
    started: int = 0
    aborted: int = 0
    stale_refused: int = 0
    leases_expired: int = 0
    frames_rejected: int = 0
    bytes_landed: int = 0
