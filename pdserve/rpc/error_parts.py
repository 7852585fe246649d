"""Rebuilds errors from what messages carry of them. Pure: state machines use it."""

from collections.abc import Mapping

from pdserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    LocalPrefillRefused,
    ModelNotFound,
    NoBrain,
    NoWorker,
    Overloaded,
    PdserveError,
    RequestNotFound,
    StaleAttempt,
    TooLong,
    Unauthenticated,
    WorkerLost,
)

_PLAIN: Mapping[str, type[PdserveError]] = {
    error.reason: error
    for error in (
        ModelNotFound,
        RequestNotFound,
        Unauthenticated,
        DeadlineExceeded,
        Cancelled,
        LocalPrefillRefused,
        StaleAttempt,
        WorkerLost,
        InternalError,
        ConfigError,
    )
}
_BY_CODE: Mapping[int, type[PdserveError]] = {
    1: Cancelled,
    4: DeadlineExceeded,
    5: ModelNotFound,
    14: WorkerLost,
    16: Unauthenticated,
}


def error_from_parts(
    *,
    code: int,
    reason: str,
    message: str,
    field: str = "",
    limit: str = "",
    retry_after_s: float | None = None,
) -> PdserveError:
    """Rebuilds an error from a code, a reason and a message, as in `Failed` and `RankError`."""
    if reason in (InvalidField.reason, TooLong.reason):
        kind = TooLong if reason == TooLong.reason else InvalidField
        bad_field = kind(field, None, limit)
        # The value itself does not travel; the text that names it does.
        bad_field.args = (message,)
        return bad_field
    wait_s = 1.0 if retry_after_s is None else retry_after_s
    if reason == Overloaded.reason or (not reason and code == Overloaded.grpc_code):
        return Overloaded(message, wait_s)
    if reason in (NoWorker.reason, NoBrain.reason):
        kind_of_absence = NoBrain if reason == NoBrain.reason else NoWorker
        return kind_of_absence(message, wait_s)
    plain = _PLAIN.get(reason) or _BY_CODE.get(code, InternalError)
    return plain(message)
