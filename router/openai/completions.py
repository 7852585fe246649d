"""/v1/completions: its body, and what its choices look like."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from pdserve.errors import InvalidField
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.openai.call import (
    MAX_PROMPTS,
    Call,
    Outcome,
    num_samples_of,
    read_prompt_options,
    read_stream_options,
    skips_special_tokens,
)
from router.openai.choices import finish_fields
from router.openai.compatibility import UnknownFields, check_rest
from router.openai.fields import INT64, Fields, as_ids, as_text, brief
from router.openai.logprobs import CompletionLogprobs, PromptLogprobs, TokenTexts
from router.openai.sampling import own_names, read_sampling


class CompletionShape:
    """Completion choices: `text`, streamed or not."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        new_logprobs: Callable[[], CompletionLogprobs] | None,
        prompt_logprobs: PromptLogprobs | None,
        *,
        has_echo: bool,
        has_token_ids: bool,
    ) -> None:
        """Takes what a choice carries beside its text; each choice has log-probs of its own."""
        self._logprobs: defaultdict[int, CompletionLogprobs] | None = None
        if new_logprobs is not None:
            self._logprobs = defaultdict(new_logprobs)
        self._prompt_logprobs = prompt_logprobs
        self._has_echo = has_echo
        self._has_token_ids = has_token_ids

    def opening(self, choice: int) -> dict[str, object] | None:
        """Returns None: there is no role."""
        return None

    def prompt(self, choice: int, chunk: inference_pb2.PromptChunk) -> dict[str, object] | None:
        """Returns the echo, then pieces of its log-probs and of `prompt_logprobs`."""
        if not chunk.token_ids and not chunk.logprobs and self._prompt_logprobs is None:
            return None
        shown = _choice(choice, chunk.text)
        if self._has_echo and self._logprobs is not None:
            logprobs = self._logprobs[choice]
            if chunk.token_ids:
                shown["logprobs"] = logprobs.first(chunk.token_ids[0])
            else:
                shown["logprobs"] = logprobs.lists(chunk.logprobs)
        if self._prompt_logprobs is not None and not chunk.token_ids:
            shown["prompt_logprobs"] = self._prompt_logprobs.piece(chunk)
        return shown

    def beside(self, chunk: inference_pb2.PromptChunk) -> dict[str, object]:
        """Returns nothing: each choice tells of its own prompt."""
        return {}

    def delta(self, choice: int, chunk: inference_pb2.TokenChunk) -> dict[str, object]:
        """Returns new output."""
        shown = _choice(choice, chunk.text)
        if self._logprobs is not None:
            shown["logprobs"] = self._logprobs[choice].lists(chunk.logprobs)
        self._add_token_ids(shown, chunk)
        return shown

    def finish(self, choice: int, finish: inference_pb2.SampleFinish) -> dict[str, object]:
        """Returns the end, in a chunk of its own without text."""
        return {**_choice(choice, ""), **finish_fields(finish)}

    def whole(self, choice: int, outcome: Outcome) -> dict[str, object]:
        """Returns the text with its end; the prompt before it with `echo`."""
        prompt, output = outcome.prompt, outcome.output
        shown = {**_choice(choice, prompt.text + output.text), **finish_fields(outcome.finish)}
        if self._logprobs is not None:
            logprobs = self._logprobs[choice]
            if self._has_echo:
                head = logprobs.first(prompt.token_ids[0])
                shown["logprobs"] = logprobs.parts((prompt.logprobs, output.logprobs), head)
            else:
                shown["logprobs"] = logprobs.parts((output.logprobs,), {})
        if self._prompt_logprobs is not None:
            shown["prompt_logprobs"] = self._prompt_logprobs.parts(prompt.logprobs)
        self._add_token_ids(shown, output)
        return shown

    def whole_beside(self, prompt: inference_pb2.PromptChunk) -> dict[str, object]:
        """Returns nothing."""
        return {}

    def _add_token_ids(self, shown: dict[str, object], chunk: inference_pb2.TokenChunk) -> None:
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
    shape, report_names = _read_reports(fields, sampling, texts)
    model = fields.text("model") or ""
    names, prompts = _read_prompts(fields)
    is_streaming, stream_options = read_stream_options(fields, unknown)
    options = read_prompt_options(fields, is_chat=False)
    check_rest(fields, unknown)
    for wire in prompts:
        wire.model = model
        wire.sampling.CopyFrom(sampling)
    return Call(
        wires=tuple(prompts),
        prompt_names=tuple(names),
        names={**report_names, **own_names(fields)},
        num_samples=num_samples_of(sampling),
        shape=shape,
        options=options,
        is_streaming=is_streaming,
        stream_options=stream_options,
    )


def _read_reports(
    fields: Fields, sampling: types_pb2.SamplingParams, texts: TokenTexts
) -> tuple[CompletionShape, dict[str, str]]:
    """Reads what is told beside the output; returns the client's names of what it implies."""
    num_top = fields.whole("logprobs")
    num_prompt_top = sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None
    names = {}
    sampling.echo = fields.flag("echo") or False
    if num_top is not None:
        sampling.logprobs = num_top
        if sampling.echo and (num_prompt_top is None or num_prompt_top < num_top):
            # What is echoed has log-probs like the rest.
            sampling.prompt_logprobs = num_top
            names["sampling.prompt_logprobs"] = "logprobs"
    new_logprobs = None
    if num_top is not None:
        skips_special = skips_special_tokens(sampling)
        new_logprobs = partial(
            CompletionLogprobs, texts, num_top, skip_special_tokens=skips_special
        )
    shape = CompletionShape(
        new_logprobs,
        None if num_prompt_top is None else PromptLogprobs(texts, num_prompt_top),
        has_echo=sampling.echo,
        has_token_ids=fields.flag("return_token_ids") or False,
    )
    return shape, names


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
