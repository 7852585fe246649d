"""A plain client of the Inference service: builds requests, gathers streams, shows results."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from pdserve.errors import DeadlineExceeded, InternalError, PdserveError, WorkerLost
from pdserve.rpc.server import channel_options
from pdserve.rpc.status import error_from_rpc, has_details
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2

_NO_CONNECTION = re.compile(r"failed to connect|resolution|no addresses|Address", re.IGNORECASE)
"""In what gRPC says when it never reached anybody (grpcio 1.8x)."""


@dataclass(kw_only=True)
class SampleOutput:
    """The output of one of several samples."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    finish: inference_pb2.SampleFinish | None = None


@dataclass(kw_only=True)
class Generation:
    """What came of one request, so far or in the end; of its first sample unless said otherwise."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    samples: dict[int, SampleOutput] = field(default_factory=dict)
    """All samples by index, the first one included."""
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt, if it was asked for (`echo`)."""
    prompt_text: str = ""
    prompt_logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    """Of the prompt from its second token on."""
    sequences: list[int] = field(default_factory=list)
    """Numbers of the messages, to be gap-free from 0."""
    finish: inference_pb2.SampleFinish | None = None
    usage: types_pb2.Usage | None = None
    timeline: types_pb2.Timeline | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> str:
        """Takes in one message and returns the text it brought."""
        self.request_id = response.request_id
        self.sequences.append(response.sequence)
        if response.HasField("completion"):
            completion = response.completion
            self.finish = completion.samples[0] if completion.samples else None
            for finish in completion.samples:
                self.samples.setdefault(finish.index, SampleOutput()).finish = finish
            self.usage, self.timeline = completion.usage, completion.timeline
            return ""
        if response.HasField("prompt"):
            prompt = response.prompt
            self.prompt_ids += prompt.token_ids
            self.prompt_text += prompt.text
            self.prompt_logprobs += prompt.logprobs
            return prompt.text
        chunk = response.chunk
        sample = self.samples.setdefault(chunk.index, SampleOutput())
        sample.token_ids += chunk.token_ids
        sample.text += chunk.text
        sample.logprobs += chunk.logprobs
        if chunk.index:
            return ""
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        return chunk.text

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`.

        Raises:
            InternalError: the stream ended without a completion.
        """
        if self.finish is None:
            raise InternalError("the stream ended without a completion")
        name = types_pb2.FinishReason.Name(self.finish.finish_reason)
        return name.removeprefix("FINISH_REASON_").lower()


def open_sync_channel(address: str) -> grpc.Channel:
    """Opens a blocking channel to a router."""
    return grpc.insecure_channel(address, options=channel_options())


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that shows an API key; none without one."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def generate_stream(
    channel: grpc.Channel,
    request: inference_pb2.GenerateRequest,
    *,
    timeout_s: float | None = None,
    api_key: str | None = None,
    address: str | None = None,
    on_text: Callable[[str], None] = lambda _: None,
) -> Generation:
    """Runs one request to its end.

    Args:
        channel: to the router.
        request: what to generate.
        timeout_s: the request's time budget.
        api_key: if the router asks for one.
        address: where the channel leads, for messages.
        on_text: takes text as it comes.

    Raises:
        PdserveError: what the server said, or that nobody listens.
    """
    call = inference_pb2_grpc.InferenceStub(channel).Generate(
        request, timeout=timeout_s, metadata=bearer(api_key)
    )
    generation = Generation()
    try:
        responses: Iterable[inference_pb2.GenerateResponse] = call
        for response in responses:
            text = generation.add(response)
            if text:
                on_text(text)
    except grpc.RpcError as error:
        raise client_error(error, address) from error
    finally:
        # Ends the call if this thread was interrupted; a finished one does not mind.
        call.cancel()
    return generation


def get_loads(channel: grpc.Channel, *, timeout_s: float = 10.0) -> list[inference_pb2.WorkerInfo]:
    """Asks for every worker's state.

    Raises:
        PdserveError: what the server said, or that nobody listens.
    """
    stub = inference_pb2_grpc.InferenceStub(channel)
    try:
        answer = stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        raise client_error(error) from error
    return list(answer.workers)


def client_error(error: grpc.RpcError, address: str | None = None) -> PdserveError:
    """Turns a failed call into our error; what gRPC says of connections gets a plain text."""
    found = error_from_rpc(error)
    if has_details(error):
        return found
    if isinstance(found, DeadlineExceeded):
        return DeadlineExceeded("no whole answer came within the time that it was given")
    if not isinstance(found, WorkerLost):
        return found
    text = str(found)
    if _NO_CONNECTION.search(text):
        return WorkerLost(f"nobody serves {'there' if address is None else f'at {address}'}")
    return WorkerLost("the connection to the router broke: it ended, or the network did")


def to_dict(generation: Generation) -> dict[str, object]:
    """Shapes a finished generation for JSON; field names are those of the protocol."""
    result: dict[str, object] = {
        "request_id": generation.request_id,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "matched_stop": _matched_stop(generation.finish),
        "usage": message_to_dict(generation.usage or types_pb2.Usage()),
        "timeline": message_to_dict(generation.timeline or types_pb2.Timeline()),
    }
    if generation.logprobs:
        result["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [{"token_id": t.token_id, "logprob": t.logprob} for t in entry.top],
            }
            for entry in generation.logprobs
        ]
    return result


def message_to_dict(message: types_pb2.Usage | types_pb2.Timeline) -> dict[str, object]:
    """Lists a flat message's fields by name, unset ones as their zero."""
    values: dict[str, object] = {
        descriptor.name: descriptor.default_value for descriptor in message.DESCRIPTOR.fields
    }
    values.update({descriptor.name: value for descriptor, value in message.ListFields()})
    return values


def _matched_stop(finish: inference_pb2.SampleFinish | None) -> str | int | None:
    if finish is None:
        return None
    which = finish.WhichOneof("matched_stop")
    if which == "stop_string":
        return finish.stop_string
    return finish.stop_token_id if which == "stop_token_id" else None
