"""Pieces of a choice that both endpoints share."""

from pdserve.rpc.codec import finish_reason_from_wire
from pdserve.rpc.v1 import inference_pb2


def finish_fields(finish: inference_pb2.SampleFinish) -> dict[str, object]:
    """Returns why a sample ended; `stop_reason` is vLLM's name for what matched."""
    matched = finish.WhichOneof("matched_stop")
    stop_reason: str | int | None = None
    if matched == "stop_string":
        stop_reason = finish.stop_string
    elif matched == "stop_token_id":
        stop_reason = finish.stop_token_id
    return {
        "finish_reason": finish_reason_from_wire(finish.finish_reason).value,
        "stop_reason": stop_reason,
    }
