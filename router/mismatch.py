"""Says in words why two workers cannot exchange KV, from what they registered."""

from pdserve.config.model import AGREED_FIELDS
from pdserve.registry.base import WorkerRecord


def find_mismatch(record: WorkerRecord, other: WorkerRecord) -> str | None:
    """Names the fields that differ, with both values; None if the two go together."""
    if record.compatibility_digest == other.compatibility_digest:
        return None
    mine, theirs = _fields_of(record), _fields_of(other)
    differing = [
        f"{name} {mine[name]} and {theirs[name]}"
        for name in AGREED_FIELDS
        if name in mine and name in theirs and mine[name] != theirs[name]
    ]
    # Fields that a worker does not show are constants of its version.
    return ", ".join(differing) or "layout or wire_version"


def _fields_of(record: WorkerRecord) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in record.geometry.split())
    return {name: value for name, _, value in pairs}
