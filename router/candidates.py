"""The ways a request could have gone, with what each would cost: kept to explain a choice."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from router.fleet import FloatArray
from router.worker_key import WorkerKey

Path = Literal["disaggregated", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way, in seconds; in KV blocks while the predictor is not fitted."""

    prefill: WorkerKey | None
    """None: the decode worker prefills by itself."""
    decode: WorkerKey
    queue: float
    """Until the prompt is computed: what waits before it."""
    prefill_time: float
    """Computing its uncached tokens."""
    handoff: float
    """What of the hand-off does not hide behind that, links that are busy included."""
    wait: float
    """Until decode has room, beyond all that."""
    step: float
    """A step of decoding with it: the time between its tokens."""
    stall: float
    """What others lose, on average: the local path holds up those that decode there."""
    first_token: float
    """Until the first token."""
    cost: float
    missed: float
    """By how much the wanted time per token is missed."""

    @property
    def path(self) -> Path:
        """Who computes the prompt."""
        return "local" if self.prefill is None else "disaggregated"


TERMS = (
    "queue",
    "prefill_time",
    "handoff",
    "wait",
    "step",
    "stall",
    "first_token",
    "cost",
    "missed",
)
"""In the order of `Candidate`."""
FIRST_TOKEN, COST, MISSED = 6, 7, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateTable:
    """The best of them, the chosen one first. Compact: it is made for each request."""

    is_in_seconds: bool
    terms: FloatArray
    """[candidates, TERMS]."""
    pairs: tuple[tuple[WorkerKey | None, WorkerKey], ...]

    def candidates(self) -> tuple[Candidate, ...]:
        """Returns them one by one."""
        return tuple(self.candidate(number) for number in range(len(self.pairs)))

    def candidate(self, number: int) -> Candidate:
        """Returns one of them; 0 is the chosen one."""
        prefill, decode = self.pairs[number]
        values = dict(zip(TERMS, np.asarray(self.terms[number]).tolist(), strict=True))
        return Candidate(prefill=prefill, decode=decode, **values)
