"""What a failed call carries: its code, and the rich details behind it."""

from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2

from launcher.client import Generation
from pdserve.rpc.status import DETAILS_KEY, DOMAIN
from pdserve.rpc.v1 import inference_pb2
from tests.support.cluster import HarnessClient, make_request

OWN_DEADLINE = "Stream removed (Deadline Exceeded)"
"""What grpc writes when a client's own deadline fires as the server's trailers arrive:
the call then ends with the server's metadata under the client's text."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One terminal error status."""

    code: grpc.StatusCode
    message: str
    reason: str | None = None
    fields: tuple[str, ...] = ()
    """Of BadRequest."""
    retry_after_s: float | None = None
    """Of RetryInfo."""
    num_messages: int = 0
    """That came before it."""
    metadata: dict[str, str | bytes] = field(default_factory=dict)


def failure_of(error: grpc.aio.AioRpcError, num_messages: int = 0) -> Failure:
    """Reads a status with its details; both must say the same code and text."""
    metadata = dict(error.trailing_metadata() or ())
    reason, fields, retry_after_s = None, [], None
    raw = metadata.get(DETAILS_KEY)
    if isinstance(raw, bytes):
        status = status_pb2.Status.FromString(raw)
        assert status.code == error.code().value[0]
        assert error.details() in (status.message, OWN_DEADLINE)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                assert info.domain == DOMAIN
                reason = info.reason
            elif detail.Unpack(bad):
                fields += [violation.field for violation in bad.field_violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return Failure(
        code=error.code(),
        message=error.details() or "",
        reason=reason,
        fields=tuple(fields),
        retry_after_s=retry_after_s,
        num_messages=num_messages,
        metadata=metadata,
    )


async def try_request(
    client: HarnessClient,
    request: inference_pb2.GenerateRequest | None = None,
    *,
    timeout_s: float = 30.0,
    **fields: object,
) -> Generation | Failure:
    """Runs a request to its one terminal event; `fields` as of `make_request`."""
    generation = Generation()
    try:
        async for message in client.start(request or make_request(**fields), timeout_s=timeout_s):
            generation.add(message)
    except grpc.aio.AioRpcError as error:
        return failure_of(error, len(generation.sequences))
    return generation


async def fail(
    client: HarnessClient,
    request: inference_pb2.GenerateRequest | None = None,
    *,
    timeout_s: float = 30.0,
    **fields: object,
) -> Failure:
    """Runs a request that must fail."""
    found = await try_request(client, request, timeout_s=timeout_s, **fields)
    assert isinstance(found, Failure), "it ended well"
    return found
