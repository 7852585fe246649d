"""The messages of one client's stream."""

from pdserve.rpc.v1 import inference_pb2
from router.output import Delta


class ResponseWriter:
    """Makes the messages of one stream and numbers them from 0.

    All token messages are one object, and hold until the next is asked for: a write encodes its
    message before it waits for anything, and a new one per token costs three times as much.
    """

    __slots__ = ("_chunk", "_has_logprobs", "_next_sequence", "_num_ids", "_response", "_token_ids")

    def __init__(self, request_id: str) -> None:
        """Starts before the first message."""
        self._response = inference_pb2.GenerateResponse(request_id=request_id)
        self._next_sequence = 0
        self._chunk = self._response.chunk
        self._token_ids = self._chunk.token_ids
        self._num_ids = 0
        self._has_logprobs = False

    def tokens(self, delta: Delta) -> inference_pb2.GenerateResponse:
        """Returns the message for new output."""
        response, chunk, new_ids = self._response, self._chunk, delta.token_ids
        response.sequence = self._next_sequence
        self._next_sequence += 1
        chunk.index = delta.index
        chunk.text = delta.text
        if len(new_ids) == self._num_ids == 1:
            self._token_ids[0] = new_ids[0]
        else:
            self._token_ids[:] = new_ids
            self._num_ids = len(new_ids)
        if self._has_logprobs or delta.logprobs:
            chunk.ClearField("logprobs")
            chunk.logprobs.extend(delta.logprobs)
            self._has_logprobs = bool(delta.logprobs)
        return response

    def prompt(self, chunk: inference_pb2.PromptChunk) -> inference_pb2.GenerateResponse:
        """Returns a message for what is said of the prompt."""
        message = self._message()
        message.prompt.CopyFrom(chunk)
        return message

    def completion(self, completion: inference_pb2.Completion) -> inference_pb2.GenerateResponse:
        """Returns the last message."""
        message = self._message()
        message.completion.CopyFrom(completion)
        return message

    def _message(self) -> inference_pb2.GenerateResponse:
        sequence = self._next_sequence
        self._next_sequence += 1
        return inference_pb2.GenerateResponse(
            request_id=self._response.request_id, sequence=sequence
        )
