"""One request's way through a simulated cluster, and what is known of it at its end."""

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.request import Request, RequestId
from router.worker_key import WorkerKey
from simulation.piece_chain import PieceChain
from simulation.workload import Arrival


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


@dataclass(slots=True, eq=False)
class Journey:
    """A request at the router."""

    arrival: Arrival
    request: Request
    """The present attempt."""
    token: int
    """What its output consists of."""
    chain: PieceChain | None = None
    """Of the prompt; workers get copies."""
    granules: tuple[int, ...] = ()
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    is_admitted: bool = False
    is_placed: bool = False
    is_waiting: bool = True
    """As admission counts it: no worker has begun with it."""
    tried: set[WorkerKey] = field(default_factory=set)
    """Decode workers that refused it since it was computed."""
    first_s: float | None = None
    last_s: float | None = None
    second_s: float | None = None
    cached_tokens: int = 0
    """Found in the prefix cache where the prompt was computed first."""
    outcome: Outcome = Outcome.UNFINISHED

    @property
    def request_id(self) -> RequestId:
        """Of all attempts."""
        return self.request.request_id

    def record(self) -> "Record":
        """Returns what a report needs."""
        arrival = self.arrival
        return Record(
            at_s=arrival.at_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=arrival.num_output_tokens,
            cached_tokens=self.cached_tokens,
            ttft_s=None if self.first_s is None else self.first_s - arrival.at_s,
            tpot_s=self._tpot_s(),
            hand_over_s=(
                None
                if self.first_s is None or self.second_s is None
                else self.second_s - self.first_s
            ),
            end_s=self.last_s,
            attempts=self.request.attempt,
            outcome=self.outcome,
        )

    def _tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.outcome is not Outcome.DONE:
            return None
        gaps = self.arrival.num_output_tokens - 1
        return (self.last_s - self.first_s) / gaps if gaps else 0.0


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
