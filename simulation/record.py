"""What is known of a simulated request at its end."""

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    """By admission, before anything was computed."""
    TOO_LONG = "too long"
    """No worker could ever hold it."""
    FAILED = "failed"
    """Too many attempts."""
    UNFINISHED = "unfinished"
    """The simulation ended first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What became of one request."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    cached_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    """Mean time from one token to the next; 0 for a single one."""
    hand_over_s: float | None
    """From the first token to the second: where the hand-off shows."""
    end_s: float | None
    attempts: int
    outcome: Outcome
