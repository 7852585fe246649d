"""Turns our errors into rich gRPC statuses and back.

A status carries, in `grpc-status-details-bin`, an ErrorInfo (reason, domain `pdserve`), for a bad
field a BadRequest, and where a retry makes sense a RetryInfo.
"""

from collections.abc import Sequence
from typing import Protocol

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pdserve.errors import InvalidField, NoWorker, Overloaded, PdserveError, TransferError
from pdserve.rpc.error_parts import error_from_parts

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
DOMAIN = "pdserve"
MAX_MESSAGE_CHARACTERS = 1024
"""A status travels in HTTP/2 headers, whose default limit is 8 KiB."""

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class AbortableContext(Protocol):
    """The part of `grpc.aio.ServicerContext` that ends a call with a status."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> object:
        """Raises, and so ends the call."""
        ...


async def abort_with(context: AbortableContext, error: PdserveError) -> None:
    """Ends a call with an error's status and details; never returns."""
    status = status_of(error)
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if isinstance(error, Overloaded | NoWorker):
        metadata.append((PUSHBACK_KEY, str(round(error.retry_after_s * 1000))))
    await context.abort(_CODES[error.grpc_code], status.message, tuple(metadata))


def status_of(error: PdserveError) -> status_pb2.Status:
    """Encodes an error as a google.rpc.Status."""
    status = status_pb2.Status(code=error.grpc_code, message=str(error)[:MAX_MESSAGE_CHARACTERS])
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, TransferError):
        info.metadata.update(
            handoff_id=error.handoff_id,
            peer=error.peer,
            state=error.state,
            retry_is_safe=str(error.retry_is_safe),
        )
    if isinstance(error, InvalidField):
        info.metadata.update(field=error.field, limit=error.limit)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=status.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | NoWorker):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status.details.add().Pack(info)
    return status


def error_from_rpc(error: grpc.RpcError) -> PdserveError:
    """Decodes the failure of a call (an `AioRpcError` or a sync `RpcError` with metadata).

    A status without our details keeps its meaning by code: UNAVAILABLE (nobody listens, or the
    connection broke) becomes WorkerLost, DEADLINE_EXCEEDED becomes DeadlineExceeded.
    """
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY:
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value if isinstance(value, bytes) else value.encode())
        except DecodeError:
            break
        return error_from_status(status)
    code: int = error.code().value[0]
    return error_from_parts(code=code, reason="", message=error.details() or "")


def has_details(error: grpc.RpcError) -> bool:
    """Says whether a call failed by a status of ours, and not by gRPC's own."""
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def error_from_status(status: status_pb2.Status) -> PdserveError:
    """Decodes what `status_of` made."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
    if info.reason == TransferError.reason:
        fields = info.metadata
        transfer_error = TransferError(
            fields["handoff_id"],
            fields["peer"],
            fields["state"],
            retry_is_safe=fields["retry_is_safe"] == "True",
        )
        return transfer_error
    return error_from_parts(
        code=status.code,
        reason=info.reason,
        message=status.message,
        field=info.metadata.get("field", ""),
        limit=info.metadata.get("limit", ""),
        retry_after_s=retry.retry_delay.ToTimedelta().total_seconds()
        if retry.HasField("retry_delay")
        else None,
    )
