"""The ways a request could have gone, with what each would cost: kept to explain a choice."""

from collections.abc import Callable
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
    """Of decoding with it: the time between its tokens."""
    stall: float
    """What others lose, on average: prompts that will wait behind it, and on the local path those
    that decode there."""
    first_token: float
    """Until the first token."""
    cost: float
    """Until the last token that is expected, and what others lose."""
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


Pairs = tuple[tuple[WorkerKey | None, WorkerKey], ...]
"""Who computes the prompt, None being whoever decodes; and who decodes."""
Ways = tuple[FloatArray, Pairs]
"""[candidates, TERMS], and as many pairs."""


class CandidateTable:
    """The best of them, the chosen one first."""

    def __init__(
        self,
        *,
        is_in_seconds: bool,
        terms: FloatArray,
        pairs: Pairs,
        find_all: Callable[[], Ways] | None = None,
    ) -> None:
        """Knows some, of which the first is the chosen one.

        Args:
            is_in_seconds: costs are seconds; else KV blocks.
            terms: [candidates, TERMS].
            pairs: as many.
            find_all: finds all when somebody asks, from what was known at the choice: most requests
                are never explained, and who waits for the choice need not wait for that.
        """
        self.is_in_seconds = is_in_seconds
        self._ways = terms, pairs
        self._find_all = find_all

    @property
    def terms(self) -> FloatArray:
        """[candidates, TERMS]."""
        return self._all()[0]

    @property
    def pairs(self) -> Pairs:
        """Of all candidates."""
        return self._all()[1]

    def candidates(self) -> tuple[Candidate, ...]:
        """Returns them one by one."""
        return tuple(_candidate(self._all(), number) for number in range(len(self.pairs)))

    def chosen(self) -> Candidate:
        """Returns the first of them."""
        return _candidate(self._ways, 0)

    def _all(self) -> Ways:
        if self._find_all is not None:
            self._ways, self._find_all = self._find_all(), None
        return self._ways


def _candidate(ways: Ways, number: int) -> Candidate:
    terms, pairs = ways
    prefill, decode = pairs[number]
    values = dict(zip(TERMS, np.asarray(terms[number]).tolist(), strict=True))
    return Candidate(prefill=prefill, decode=decode, **values)
