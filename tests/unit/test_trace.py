import pytest

from pdserve.request import Request, RequestId, SamplingParams
from pdserve.rpc.codec import ids_for_log, request_from_wire, request_to_wire
from pdserve.trace import TraceId, parse_traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "text",
    [
        f"00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-00",
        f"  00-{TRACE}-{PARENT}-ff\t",
        f"01-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01-what-comes-later",
    ],
)
def test_a_valid_traceparent_gives_its_trace_id(text: str) -> None:
    assert parse_traceparent([text]) == TRACE


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01-more"],
        [f"00-{TRACE}-{PARENT}-01-"],
        [f"00-{TRACE}-{PARENT}"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"01-{TRACE}-{PARENT}-01more"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{TRACE[:-1]}-{PARENT}-01"],
        [f"00-{TRACE[:-1]}g-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"0-{TRACE}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01\n"],
        [f"cc-{TRACE}-{PARENT}-01-" + "x" * 10_000],
    ],
)
def test_an_invalid_traceparent_is_as_good_as_none(values: list[str]) -> None:
    assert parse_traceparent(values) is None


@pytest.mark.parametrize("trace_id", [None, TraceId(TRACE)])
def test_the_trace_id_travels_with_the_request_and_its_samples(trace_id: TraceId | None) -> None:
    request = Request(
        request_id=RequestId("r"),
        token_ids=(5, 6),
        num_prompt_tokens=2,
        sampling=SamplingParams(max_tokens=2, n=2),
        trace_id=trace_id,
    )
    wire = request_to_wire(request)
    assert request_from_wire(wire).trace_id == trace_id
    assert {one.trace_id for one in request.samples()} == {trace_id}
    assert ids_for_log(wire)["trace_id"] == trace_id
