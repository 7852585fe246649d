import json

import pytest

from launcher.client import Generation, to_dict
from pdserve.errors import InternalError
from pdserve.rpc.v1 import inference_pb2, types_pb2


def chunk(sequence: int, ids: list[int], text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id="r1",
        sequence=sequence,
        chunk=inference_pb2.TokenChunk(
            token_ids=ids,
            text=text,
            logprobs=[
                types_pb2.TokenLogprob(
                    token_id=i,
                    logprob=-0.5,
                    top=[types_pb2.TopLogprob(token_id=i, logprob=-0.5)],
                )
                for i in ids
            ],
        ),
    )


def completion(sequence: int, **finish: object) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id="r1",
        sequence=sequence,
        completion=inference_pb2.Completion(
            samples=[inference_pb2.SampleFinish(**finish)],
            usage=types_pb2.Usage(prompt_tokens=3, completion_tokens=2),
            timeline=types_pb2.Timeline(ttft_s=0.25, kv_bytes_shipped=2**40, decode_worker="d"),
        ),
    )


def test_stream_is_gathered_into_ids_text_and_sequence_numbers() -> None:
    generation = Generation()
    texts = [
        generation.add(message)
        for message in (
            chunk(0, [5], "Hel"),
            chunk(1, [6], "lo"),
            completion(2, finish_reason=types_pb2.FINISH_REASON_LENGTH),
        )
    ]
    assert texts == ["Hel", "lo", ""]
    assert generation.token_ids == [5, 6]
    assert generation.text == "Hello"
    assert generation.sequences == [0, 1, 2]
    assert generation.finish_reason == "length"


def test_json_names_every_field_and_keeps_large_numbers_whole() -> None:
    generation = Generation()
    generation.add(chunk(0, [5], "x"))
    generation.add(completion(1, finish_reason=types_pb2.FINISH_REASON_STOP, stop_string="END"))
    found = json.loads(json.dumps(to_dict(generation)))
    assert found["finish_reason"] == "stop"
    assert found["matched_stop"] == "END"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    assert found["timeline"]["kv_bytes_shipped"] == 2**40
    assert found["timeline"]["recomputed_tokens"] == 0
    assert set(found["timeline"]) == {f.name for f in types_pb2.Timeline.DESCRIPTOR.fields}
    assert found["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}]}
    ]


def test_matched_stop_token_zero_is_not_lost() -> None:
    generation = Generation()
    generation.add(completion(0, finish_reason=types_pb2.FINISH_REASON_STOP, stop_token_id=0))
    assert to_dict(generation)["matched_stop"] == 0


def test_stream_without_a_completion_has_no_finish_reason() -> None:
    generation = Generation()
    generation.add(chunk(0, [5], "x"))
    with pytest.raises(InternalError, match="ended without a completion"):
        to_dict(generation)
