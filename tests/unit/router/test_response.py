import pytest

from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.intake import token_chunk
from router.output import Delta
from router.response import ResponseWriter


def _scored(token_id: int) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)


def _written(message: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse.FromString(message.SerializeToString())


DELTAS = (
    Delta(token_ids=[7], text="a"),
    Delta(token_ids=[8], text=""),
    Delta(index=2, token_ids=[9, 10], text="bc"),
    Delta(token_ids=[], text="held back"),
    Delta(token_ids=[11], text="d", logprobs=[_scored(11)]),
    Delta(token_ids=[0], text="", logprobs=[_scored(0), _scored(1)]),
    Delta(token_ids=[12], text="é"),
    Delta(token_ids=[13], text="f"),
)


def test_nothing_of_a_message_is_left_in_the_next():
    writer = ResponseWriter("gen-1")
    for sequence, delta in enumerate(DELTAS):
        assert _written(writer.tokens(delta)) == inference_pb2.GenerateResponse(
            request_id="gen-1", sequence=sequence, chunk=token_chunk(delta)
        )


@pytest.mark.parametrize("delta", DELTAS)
def test_any_output_may_be_the_first(delta):
    message = _written(ResponseWriter("gen-1").tokens(delta))
    assert message.WhichOneof("event") == "chunk"
    assert message.chunk == token_chunk(delta)


def test_prompt_output_and_completion_are_numbered_together():
    writer = ResponseWriter("gen-1")
    prompt = inference_pb2.PromptChunk(token_ids=[1, 2], text="hi")
    completion = inference_pb2.Completion(usage=types_pb2.Usage(prompt_tokens=2))
    messages = [
        _written(writer.prompt(prompt)),
        _written(writer.tokens(DELTAS[0])),
        _written(writer.prompt(prompt)),
        _written(writer.tokens(DELTAS[1])),
        _written(writer.completion(completion)),
    ]
    assert [one.sequence for one in messages] == [0, 1, 2, 3, 4]
    assert [one.WhichOneof("event") for one in messages] == [
        *("prompt", "chunk", "prompt", "chunk", "completion")
    ]
    assert messages[2].prompt == prompt
    assert messages[4].completion == completion
