"""What an error is over HTTP: its status, its body, its headers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidField,
    ModelNotFound,
    NoBrain,
    NoWorker,
    Overloaded,
    PdserveError,
    RequestNotFound,
    TooLong,
    TransferError,
    Unauthenticated,
    WorkerLost,
)

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class HttpRefusal(PdserveError):
    """Something that only HTTP can do wrong: a path, a method, a body."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """Takes the status and the code that stand in the answer."""
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """How a kind of error is shown."""

    status: int
    kind: str
    code: str


_TABLE: tuple[tuple[type[PdserveError], Meaning], ...] = (
    # Subclasses before their bases: the first match counts.
    (TooLong, Meaning(status=400, kind="invalid_request_error", code="context_length_exceeded")),
    (InvalidField, Meaning(status=400, kind="invalid_request_error", code="invalid_value")),
    (Unauthenticated, Meaning(status=401, kind="authentication_error", code="invalid_api_key")),
    (ModelNotFound, Meaning(status=404, kind="not_found_error", code="model_not_found")),
    (RequestNotFound, Meaning(status=404, kind="not_found_error", code="request_not_found")),
    (Overloaded, Meaning(status=429, kind="overloaded_error", code="overloaded")),
    (Cancelled, Meaning(status=499, kind="cancelled_error", code="cancelled")),
    (NoBrain, Meaning(status=503, kind="service_unavailable_error", code="no_brain")),
    (NoWorker, Meaning(status=503, kind="service_unavailable_error", code="no_worker")),
    (WorkerLost, Meaning(status=503, kind="service_unavailable_error", code="worker_lost")),
    (TransferError, Meaning(status=503, kind="service_unavailable_error", code="transfer_failed")),
    (DeadlineExceeded, Meaning(status=504, kind="timeout_error", code="deadline_exceeded")),
)
_BUG = Meaning(status=500, kind="internal_error", code="internal_error")
_REFUSAL_KINDS = {404: "not_found_error", 408: "timeout_error"}


def meaning_of(error: PdserveError) -> Meaning:
    """Finds how an error is shown; one without a place in the table is our own bug."""
    if isinstance(error, HttpRefusal):
        kind = _REFUSAL_KINDS.get(error.status, "invalid_request_error")
        return Meaning(status=error.status, kind=kind, code=error.code)
    return next((meaning for kind, meaning in _TABLE if isinstance(error, kind)), _BUG)


def error_body(error: PdserveError) -> dict[str, object]:
    """Returns `{"error": {message, type, param, code}}`."""
    meaning = meaning_of(error)
    is_bug = meaning is _BUG
    return {
        "error": {
            # Our own bugs are told in the log, not to the client.
            "message": "the router failed on this request" if is_bug else str(error),
            "type": meaning.kind,
            "param": _param_of(error),
            "code": meaning.code,
        }
    }


def _param_of(error: PdserveError) -> str | None:
    if isinstance(error, ModelNotFound):
        return "model"
    return error.field if isinstance(error, InvalidField) else None


def error_response(error: PdserveError) -> Response:
    """Returns the whole answer, with Retry-After where a retry makes sense."""
    status = meaning_of(error).status
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | NoWorker):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 503:
        headers["retry-after"] = "1"
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), status, headers)


def json_response(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a JSON answer."""
    return json_body(to_json(body), status, headers)


def json_body(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an answer that is encoded already."""
    return Response(body, status, headers, "application/json")


def to_json(body: Mapping[str, object]) -> bytes:
    """Encodes compactly; what is no JSON (NaN) is a bug and raises."""
    return encode_json(body)


def encode_json(value: object) -> bytes:
    """Encodes any value as `to_json` does."""
    return _ENCODER.encode(value).encode()
