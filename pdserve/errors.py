"""The error tree. Each error knows its gRPC status and the reason shown to clients.

PdserveError
  InvalidField          a bad value in a request: names field, value and limit
    TooLong             prompt plus output over the effective limit
  ModelNotFound         the request names a model that is not served
  RequestNotFound       no request of this id, or none of the caller's own
  Unauthenticated       no API key, or a wrong one
  Overloaded            a queue or pool is full; carries a retry hint
  NoWorker              no worker of a pool can take the request now
    NoBrain             what chooses workers for all fronts is away, or does not answer
  DeadlineExceeded      the request's time budget ran out
  Cancelled             the client went away or asked to stop
  LocalPrefillRefused   a decode worker would have had to compute prompt tokens beyond its limit
  StaleAttempt          a message of a fenced attempt or of an earlier incarnation
  TransferError         a hand-off failed; says whether a retry is safe
  WorkerLost            a worker died or froze
  PoolApiError          whoever runs replicas elsewhere refused an order, or did not answer
  InternalError         our own bug, seen at a server's edge
  ConfigError           a flag, file or model folder the user can mend (exits 2, never a status)
"""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self


class PdserveError(Exception):
    """Base of all errors that pdserve raises on purpose."""

    grpc_code: ClassVar[int] = 13
    """A google.rpc.Code."""
    reason: ClassVar[str] = "INTERNAL"


class InvalidField(PdserveError):
    """A field of a request holds a value that is not allowed."""

    grpc_code = 3
    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, limit: str) -> None:
        """Names the field, the value (shortened to 64 characters) and what is allowed."""
        shown = repr(value)
        if len(shown) > 64:
            shown = shown[:61] + "..."
        super().__init__(f"{field} must be {limit}, got {shown}")
        self.field = field
        self.limit = limit

    def renamed(self, field: str) -> Self:
        """Returns this error with its field under the name that the caller used."""
        renamed = type(self)(field, None, self.limit)
        # The value is in the text alone.
        renamed.args = (str(self).replace(self.field, field, 1),)
        return renamed


class TooLong(InvalidField):
    """The prompt, or prompt plus max_tokens, exceeds the effective model length."""

    reason = "TOO_LONG"


class ModelNotFound(PdserveError):
    """The request names a model that this cluster does not serve."""

    grpc_code = 5
    reason = "MODEL_NOT_FOUND"


class RequestNotFound(PdserveError):
    """No request of this id is in flight for this caller."""

    grpc_code = 5
    reason = "REQUEST_NOT_FOUND"


class Unauthenticated(PdserveError):
    """The caller showed no API key, or one that is not known."""

    grpc_code = 16
    reason = "UNAUTHENTICATED"


class Overloaded(PdserveError):
    """A bounded queue or pool is full."""

    grpc_code = 8
    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        """Carries the shortest wait after which a retry makes sense."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(PdserveError):
    """No worker of the needed pool is alive and accepting."""

    grpc_code = 14
    reason = "NO_WORKER"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        """Carries the shortest wait after which a retry makes sense."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoBrain(NoWorker):
    """The brain of several fronts is away or does not answer: nobody can choose a worker now."""

    reason = "NO_BRAIN"


class DeadlineExceeded(PdserveError):
    """The request's deadline passed."""

    grpc_code = 4
    reason = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    """The request was cancelled."""

    grpc_code = 1
    reason = "CANCELLED"


class LocalPrefillRefused(PdserveError):
    """A decode worker would have had to compute more prompt tokens than it is allowed to."""

    grpc_code = 9
    reason = "LOCAL_PREFILL_REFUSED"


class StaleAttempt(PdserveError):
    """A message belongs to a fenced attempt or to an earlier incarnation of a worker."""

    grpc_code = 9
    reason = "STALE_ATTEMPT"


class TransferError(PdserveError):
    """A hand-off of KV blocks failed."""

    grpc_code = 14
    reason = "TRANSFER_FAILED"

    def __init__(self, handoff_id: str, peer: str, state: str, *, retry_is_safe: bool) -> None:
        """Names the hand-off, the peer, the state it failed in and whether a retry is safe."""
        hint = "a retry is safe" if retry_is_safe else "do not retry"
        super().__init__(f"hand-off {handoff_id} with {peer} failed while {state}; {hint}")
        self.handoff_id = handoff_id
        self.peer = peer
        self.state = state
        self.retry_is_safe = retry_is_safe


class WorkerLost(PdserveError):
    """A worker died or froze while it held the request, and no attempt was left."""

    grpc_code = 14
    reason = "WORKER_LOST"


class PoolApiError(PdserveError):
    """Whoever runs replicas elsewhere refused an order, or did not answer."""

    grpc_code = 14
    reason = "POOL_API"

    def __init__(self, message: str, *, status: int | None) -> None:
        """Takes the HTTP status; None where there was no answer."""
        super().__init__(message)
        self.status = status


class InternalError(PdserveError):
    """A defect of pdserve itself, turned into a status at a server's edge."""


class ConfigError(PdserveError):
    """Something the user can mend before start: a flag, a file, a model folder."""

    grpc_code = 3
    reason = "CONFIG"

    def __init__(self, message: str, *, settings: Sequence[str] = ()) -> None:
        """Takes the text.

        Args:
            message: the whole of it.
            settings: words of it that are fields of a configuration: who typed a flag knows it by
                that (`renamed`).
        """
        super().__init__(message)
        self.settings = tuple(settings)

    def renamed(self, names: Mapping[str, str]) -> "ConfigError":
        """Returns this error with other names for its settings, each where it stands first."""
        text = str(self)
        for setting in self.settings:
            name = names.get(setting, setting)
            text = re.sub(rf"(?<![\w-]){re.escape(setting)}(?!\w)", lambda _: name, text, count=1)  # noqa: B023
        return ConfigError(text, settings=[names.get(one, one) for one in self.settings])
