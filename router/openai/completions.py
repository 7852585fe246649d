"""/v1/completions: its body, and what its choices look like."""

from collections import defaultdict

from pdserve.errors import InvalidField
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.openai.call import (
    MAX_PROMPTS,
    Call,
    num_samples_of,
    read_prompt_options,
    read_stream_options,
)
from router.openai.choices import finish_fields
from router.openai.compatibility import UnknownFields, check_rest
from router.openai.fields import INT64, Fields, as_ids, as_text, brief
from router.openai.logprobs import TextOffset, TokenTexts, completion_logprobs
from router.openai.sampling import read_sampling


class CompletionShape:
    """Completion choices: `text`, streamed or not."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, texts: TokenTexts, *, has_logprobs: bool, has_token_ids: bool) -> None:
        """Takes what a choice carries beside its text."""
        self._texts = texts
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._offsets: defaultdict[int, TextOffset] = defaultdict(TextOffset)

    def opening(self, choice: int) -> dict[str, object] | None:
        """Returns None: there is no role."""
        return None

    def delta(self, choice: int, chunk: inference_pb2.TokenChunk) -> dict[str, object]:
        """Returns new output."""
        shown = _choice(choice, chunk.text)
        self._add_details(shown, choice, chunk)
        return shown

    def finish(self, choice: int, finish: inference_pb2.SampleFinish) -> dict[str, object]:
        """Returns the end, in a chunk of its own without text."""
        return {**_choice(choice, ""), **finish_fields(finish)}

    def whole(
        self, choice: int, output: inference_pb2.TokenChunk, finish: inference_pb2.SampleFinish
    ) -> dict[str, object]:
        """Returns the text with its end."""
        shown = {**_choice(choice, output.text), **finish_fields(finish)}
        self._add_details(shown, choice, output)
        return shown

    def _add_details(
        self, shown: dict[str, object], choice: int, chunk: inference_pb2.TokenChunk
    ) -> None:
        if self._has_logprobs:
            shown["logprobs"] = completion_logprobs(
                self._texts, chunk.logprobs, self._offsets[choice]
            )
        if self._has_token_ids:
            shown["token_ids"] = list(chunk.token_ids)


def _choice(choice: int, text: str) -> dict[str, object]:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}


def parse_completion(fields: Fields, texts: TokenTexts, unknown: UnknownFields) -> Call:
    """Reads a completions body.

    Raises:
        InvalidField: a field has the wrong type or asks for what is not supported.
    """
    sampling = read_sampling(fields)
    max_tokens = fields.whole("max_tokens", INT64)
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    num_top = fields.whole("logprobs")
    if num_top is not None:
        sampling.logprobs = num_top
    if fields.flag("echo"):
        sampling.echo = True
        if num_top is not None and not sampling.HasField("prompt_logprobs"):
            # What is echoed has log-probs like the rest.
            sampling.prompt_logprobs = num_top
    model = fields.text("model") or ""
    names, prompts = _read_prompts(fields)
    is_streaming, stream_options = read_stream_options(fields)
    returns_token_ids = fields.flag("return_token_ids") or False
    options = read_prompt_options(fields, is_chat=False)
    check_rest(fields, unknown)
    for wire in prompts:
        wire.model = model
        wire.sampling.CopyFrom(sampling)
    return Call(
        wires=tuple(prompts),
        prompt_names=tuple(names),
        names={},
        num_samples=num_samples_of(sampling),
        shape=CompletionShape(
            texts, has_logprobs=num_top is not None, has_token_ids=returns_token_ids
        ),
        options=options,
        is_streaming=is_streaming,
        stream_options=stream_options,
        returns_token_ids=returns_token_ids,
    )


def _read_prompts(fields: Fields) -> tuple[list[str], list[inference_pb2.GenerateRequest]]:
    """Reads a string, token ids, or a list of either; returns names and bare requests."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return ["prompt"], [_text_prompt("prompt", value)]
    if not isinstance(value, list):
        raise InvalidField("prompt", brief(value), "a string, token ids, or a list of either")
    if not value or (isinstance(value[0], int) and not isinstance(value[0], bool)):
        return ["prompt"], [_ids_prompt("prompt", value)]
    if len(value) > MAX_PROMPTS:
        raise InvalidField("prompt", len(value), f"at most {MAX_PROMPTS} prompts")
    names, prompts = [], []
    for position, item in enumerate(value):
        name = f"prompt[{position}]"
        names.append(name)
        if isinstance(item, list):
            prompts.append(_ids_prompt(name, item))
        else:
            prompts.append(_text_prompt(name, item))
    return names, prompts


def _text_prompt(name: str, value: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=as_text(name, value))


def _ids_prompt(name: str, values: list[object]) -> inference_pb2.GenerateRequest:
    wire = inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds())
    wire.token_ids.ids.extend(as_ids(name, values))
    return wire
