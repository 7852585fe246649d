"""Turns an explanation into its message."""

from google.protobuf.json_format import MessageToDict

from pdserve.rpc.v1 import inference_pb2
from router.candidates import Candidate
from router.explain import Explanation, PlacedAttempt


def explanation_to_wire(explanation: Explanation) -> inference_pb2.ExplainResponse:
    """Encodes what is known of a request."""
    response = inference_pb2.ExplainResponse(
        request_id=explanation.request_id,
        state=explanation.state,
        prompt_tokens=explanation.num_prompt_tokens,
        ttft_s=explanation.ttft_s,
        tpot_s=explanation.tpot_s,
        critical_path=[
            inference_pb2.PathPart(name=part.name, seconds=part.seconds)
            for part in explanation.critical_path
        ],
        placements=[_placement_to_wire(placed) for placed in explanation.placements],
        http_request_id=explanation.http_request_id,
        namesakes=explanation.namesakes,
    )
    expected_s = explanation.expected_ttft_s
    if expected_s is not None:
        response.expected_ttft_s = expected_s
    return response


def explanation_to_json(explanation: inference_pb2.ExplainResponse) -> dict[str, object]:
    """Shapes it for JSON; zeros are written."""
    shown: dict[str, object] = MessageToDict(
        explanation,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    return shown


def _placement_to_wire(placed: PlacedAttempt) -> inference_pb2.Placement:
    choice = placed.choice
    return inference_pb2.Placement(
        attempt=placed.attempt,
        at_s=placed.at_s,
        path=choice.path,
        cached_tokens=choice.cached_tokens,
        unit="seconds" if choice.table.is_in_seconds else "blocks",
        candidates=[_candidate_to_wire(one) for one in choice.table.candidates()],
    )


def _candidate_to_wire(candidate: Candidate) -> inference_pb2.Candidate:
    prefill = candidate.prefill
    return inference_pb2.Candidate(
        prefill_worker="" if prefill is None else prefill.worker_id,
        decode_worker=candidate.decode.worker_id,
        queue=candidate.queue,
        prefill=candidate.prefill_time,
        handoff=candidate.handoff,
        wait=candidate.wait,
        step=candidate.step,
        stall=candidate.stall,
        first_token=candidate.first_token,
        cost=candidate.cost,
        missed=candidate.missed,
    )
