"""/v1/chat/completions: its body, and what its choices look like."""

from pdserve.errors import InvalidField
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.openai.call import (
    Call,
    Outcome,
    num_samples_of,
    read_prompt_options,
    read_stream_options,
)
from router.openai.choices import finish_fields
from router.openai.compatibility import (
    IGNORED_IN_MESSAGES,
    UnknownFields,
    check_inside,
    check_rest,
)
from router.openai.fields import INT64, Fields, as_fields, as_text, brief
from router.openai.logprobs import PromptLogprobs, TokenTexts, chat_logprobs, chat_logprobs_parts
from router.openai.sampling import own_names, read_sampling
from router.validation import MAX_MESSAGES

MAX_PARTS = 1024
"""Parts of one message."""
_ROLES = {"developer": "system"}
"""Newer names of roles that templates know under older ones."""
_EMPTY_IN_MESSAGES = ("tool_calls", "function_call", "audio", "refusal")
_TEXT_PARTS = ("text", "input_text")


class ChatShape:
    """Chat choices: `message`, or `delta` in a stream."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        texts: TokenTexts,
        *,
        prompt_logprobs: PromptLogprobs | None,
        has_logprobs: bool,
        has_token_ids: bool,
    ) -> None:
        """Takes what an answer carries beside its text."""
        self._texts = texts
        self._prompt_logprobs = prompt_logprobs
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids

    def opening(self, choice: int) -> dict[str, object] | None:
        """Returns the role, which comes before all output."""
        return _choice(choice, {"role": "assistant", "content": ""})

    def prompt(self, choice: int, chunk: inference_pb2.PromptChunk) -> dict[str, object] | None:
        """Returns an empty delta of the first choice: all have the same prompt."""
        return None if choice else _choice(choice, {"content": ""})

    def beside(self, chunk: inference_pb2.PromptChunk) -> dict[str, object]:
        """Returns `prompt_logprobs`, piece by piece."""
        found = self._prompt_logprobs
        return {} if found is None else {"prompt_logprobs": found.piece(chunk)}

    def delta(self, choice: int, chunk: inference_pb2.TokenChunk) -> dict[str, object]:
        """Returns new output."""
        shown = _choice(choice, {"content": chunk.text})
        if self._has_logprobs:
            shown["logprobs"] = chat_logprobs(self._texts, chunk.logprobs)
        self._add_token_ids(shown, chunk)
        return shown

    def finish(self, choice: int, finish: inference_pb2.SampleFinish) -> dict[str, object]:
        """Returns the end, in a chunk of its own with an empty delta."""
        return {**_choice(choice, {}), **finish_fields(finish)}

    def whole(self, choice: int, outcome: Outcome) -> dict[str, object]:
        """Returns the message with its end."""
        content = outcome.output.text
        shown: dict[str, object] = {
            "index": choice,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None,
            **finish_fields(outcome.finish),
        }
        if self._has_logprobs:
            shown["logprobs"] = chat_logprobs_parts(self._texts, outcome.output.logprobs)
        self._add_token_ids(shown, outcome.output)
        return shown

    def whole_beside(self, prompt: inference_pb2.PromptChunk) -> dict[str, object]:
        """Returns `prompt_logprobs`."""
        found = self._prompt_logprobs
        return {} if found is None else {"prompt_logprobs": found.parts(prompt.logprobs)}

    def _add_token_ids(self, shown: dict[str, object], chunk: inference_pb2.TokenChunk) -> None:
        if self._has_token_ids:
            shown["token_ids"] = list(chunk.token_ids)


def _choice(choice: int, delta: dict[str, object]) -> dict[str, object]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


def parse_chat(fields: Fields, texts: TokenTexts, unknown: UnknownFields) -> Call:
    """Reads a chat body.

    Raises:
        InvalidField: a field has the wrong type or asks for what is not supported.
    """
    sampling = read_sampling(fields)
    max_name = _read_max_tokens(fields, sampling)
    logprobs_name = _read_logprobs(fields, sampling)
    chat = inference_pb2.ChatPrompt(messages=read_messages(fields, unknown))
    wire = inference_pb2.GenerateRequest(
        model=fields.text("model") or "", chat=chat, sampling=sampling
    )
    is_streaming, stream_options = read_stream_options(fields, unknown)
    has_token_ids = fields.flag("return_token_ids") or False
    options = read_prompt_options(fields, is_chat=True)
    check_rest(fields, unknown)
    return Call(
        wires=(wire,),
        prompt_names=("messages",),
        names={
            "sampling.max_tokens": max_name,
            "sampling.logprobs": logprobs_name,
            **own_names(fields),
        },
        num_samples=num_samples_of(sampling),
        shape=ChatShape(
            texts,
            prompt_logprobs=(
                PromptLogprobs(texts, sampling.prompt_logprobs)
                if sampling.HasField("prompt_logprobs")
                else None
            ),
            has_logprobs=sampling.HasField("logprobs"),
            has_token_ids=has_token_ids,
        ),
        options=options,
        is_streaming=is_streaming,
        stream_options=stream_options,
    )


def _read_max_tokens(fields: Fields, sampling: types_pb2.SamplingParams) -> str:
    """Reads the newer name before the older one; returns the name that was used."""
    newer = fields.whole("max_completion_tokens", INT64)
    older = fields.whole("max_tokens", INT64)
    found = older if newer is None else newer
    if found is not None:
        sampling.max_tokens = found
    return "max_tokens" if newer is None else "max_completion_tokens"


def _read_logprobs(fields: Fields, sampling: types_pb2.SamplingParams) -> str:
    is_wanted = fields.flag("logprobs") or False
    num_top = fields.whole("top_logprobs")
    if num_top is not None and not is_wanted and num_top != 0:
        raise InvalidField("top_logprobs", num_top, "absent unless logprobs is true")
    if is_wanted:
        sampling.logprobs = num_top or 0
    return "top_logprobs"


def read_messages(fields: Fields, unknown: UnknownFields) -> list[inference_pb2.ChatMessage]:
    """Reads `messages`; their roles and lengths are checked with the rest of the prompt.

    Raises:
        InvalidField: a message has the wrong shape, or holds what is no text.
    """
    items = fields.items("messages", MAX_MESSAGES)
    if items is None:
        raise InvalidField("messages", brief(None), "a list of messages")
    messages = []
    for position, item in enumerate(items):
        message = as_fields(f"messages[{position}]", item)
        role = message.text("role")
        if role is None:
            raise InvalidField(message.path_of("role"), brief(None), "a string")
        for name in _EMPTY_IN_MESSAGES:
            if message.raw(name) not in (None, []):
                limit = "absent in this release"
                raise InvalidField(message.path_of(name), brief(message.raw(name)), limit)
        content = _content_of(message, unknown)
        check_inside(message, unknown, IGNORED_IN_MESSAGES)
        messages.append(inference_pb2.ChatMessage(role=_ROLES.get(role, role), content=content))
    return messages


def _content_of(message: Fields, unknown: UnknownFields) -> str:
    content = message.raw("content")
    if not isinstance(content, list):
        text = message.text("content")
        if text is None:
            raise InvalidField(
                message.path_of("content"), brief(None), "a string or a list of text parts"
            )
        return text
    pieces = []
    for position, item in enumerate(message.items("content", MAX_PARTS) or ()):
        part = as_fields(f"{message.path_of('content')}[{position}]", item)
        kind = part.text("type")
        if kind not in _TEXT_PARTS:
            raise InvalidField(part.path_of("type"), brief(kind), "'text' in this release")
        pieces.append(as_text(part.path_of("text"), part.raw("text")))
        check_inside(part, unknown)
    return "\n".join(pieces)
