import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode

from pdserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    LocalPrefillRefused,
    ModelNotFound,
    NoWorker,
    Overloaded,
    PdserveError,
    StaleAttempt,
    TooLong,
    TransferError,
    WorkerLost,
)
from pdserve.rpc.error_parts import error_from_parts
from pdserve.rpc.server import make_server, open_channel
from pdserve.rpc.status import abort_with, error_from_rpc, status_of

ERRORS: list[PdserveError] = [
    InvalidField("sampling.top_p", 0.0, "in (0, 1]"),
    TooLong("prompt", 9000, "at most 8192 tokens"),
    ModelNotFound("no model named x"),
    Overloaded("the queue is full", 2.5),
    NoWorker("no decode worker", 0.25),
    DeadlineExceeded("out of time"),
    Cancelled("gone"),
    LocalPrefillRefused("300 tokens over 256"),
    StaleAttempt("attempt 1 is fenced"),
    TransferError("h-1", "decode-0", "sending", retry_is_safe=True),
    WorkerLost("decode-1 died"),
    InternalError("a defect"),
    ConfigError("port in use"),
]


class Failing(grpc.GenericRpcHandler):
    """Answers every call with one error."""

    def __init__(self, error: PdserveError) -> None:
        self._error = error

    def service(self, handler_call_details):
        if not handler_call_details.method.startswith("/test/"):
            return None

        async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            await abort_with(context, self._error)
            raise AssertionError("abort_with returned")

        return grpc.unary_unary_rpc_method_handler(fail)


async def _call(error: PdserveError) -> grpc.aio.AioRpcError:
    server = make_server()
    server.grpc_server.add_generic_rpc_handlers((Failing(error),))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test/Fail")(b"", timeout=5)
        return caught.value
    finally:
        await server.stop()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
async def test_every_error_survives_the_wire(error):
    caught = await _call(error)
    assert caught.code().value[0] == error.grpc_code
    decoded = error_from_rpc(caught)
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)
    for name in ("field", "limit", "retry_after_s", "handoff_id", "peer", "retry_is_safe"):
        assert vars(decoded).get(name) == vars(error).get(name)


async def test_an_overload_tells_grpc_clients_when_to_come_back():
    caught = await _call(Overloaded("full", 1.5))
    assert ("grpc-retry-pushback-ms", "1500") in tuple(caught.trailing_metadata())


def test_a_bad_field_is_named_in_bad_request():
    status = status_of(InvalidField("sampling.seed", "x" * 500, "64 bits"))
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "sampling.seed"
    assert len(status.message) < 200


def test_a_long_message_fits_in_headers():
    assert len(status_of(InternalError("x" * 100_000)).SerializeToString()) < 4096


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (StatusCode.UNAVAILABLE, WorkerLost),
        (StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (StatusCode.CANCELLED, Cancelled),
        (StatusCode.UNKNOWN, InternalError),
    ],
)
def test_a_status_without_details_keeps_its_meaning_by_code(code, kind):
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")
    decoded = error_from_rpc(bare)
    assert type(decoded) is kind
    assert str(decoded) == "why"


def test_spoilt_details_fall_back_to_the_code():
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    bare = grpc.aio.AioRpcError(StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "gone")
    assert isinstance(error_from_rpc(bare), WorkerLost)


def test_parts_of_a_workers_failure_become_its_error():
    error = error_from_parts(code=9, reason="LOCAL_PREFILL_REFUSED", message="too much")
    assert isinstance(error, LocalPrefillRefused)
    assert str(error) == "too much"
