"""The words of a request's life: phases, causes, tokens, ends, placements, fences."""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.request import FinishReason
from pdserve.rpc.v1 import types_pb2
from router.worker_key import WorkerKey


class Phase(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    UNPLACED = "unplaced"
    DECODING = "decoding"
    ENDED = "ended"


class Cause(StrEnum):
    """Why an attempt was given up."""

    WORKER_LOST = "worker_lost"
    REFUSED = "refused"
    PREEMPTED = "preempted"
    DRAINING = "draining"
    RETURNED = "returned"


# Not frozen, as one is made per token: that takes three times as long.
@dataclass(kw_only=True, slots=True)
class Token:
    """One output token in its place."""

    index: int
    token_id: int
    logprob: types_pb2.TokenLogprob | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """A natural end."""

    reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The workers of one attempt."""

    prefill: WorkerKey | None
    decode: WorkerKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """A cancel that a worker must get: this attempt and all older ones are over."""

    worker: WorkerKey
    attempt: int
