"""Which request fields are supported, ignored or refused; the table in docs/http.md is made of it.

A refused field may be given its neutral value, which asks for nothing.
"""

import logging
import re
from collections.abc import Mapping, Sequence

from pdserve.errors import InvalidField
from pdserve.log import safe_id
from router.openai.fields import Fields, JsonWord, brief

logger = logging.getLogger(__name__)

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids"),
    *("min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
)
COMMON = (
    *("model", "stream", "stream_options", "max_tokens", "logprobs", "return_token_ids"),
    *("add_special_tokens", "cache_salt"),
)
SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": (
        *COMMON,
        *SAMPLING,
        *("messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt"),
    ),
    "/v1/completions": (*COMMON, *SAMPLING, "prompt", "echo"),
}
"""Read and acted on; values out of range are refused by the checks that gRPC has too."""
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "verbosity"),
        *("reasoning_effort", "include_reasoning", "spaces_between_special_tokens"),
        # Of chats, and known wherever clients send the same extras to both endpoints.
        "add_generation_prompt",
    }
)
"""Accepted without a word: they change no output here."""
IGNORED_IN_MESSAGES = frozenset(
    {"name", "tool_call_id", "reasoning", "reasoning_content", "annotations"}
)
"""Likewise: what clients send back of an answer, or no template of ours asks for."""
IGNORED_IN_STREAM_OPTIONS = frozenset({"include_obfuscation"})
REFUSED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
    "echo": (False,),
}
"""Refused by name with 400, but for null and these values; never ignored."""
MAX_WARNED = 256
MAX_NAME_CHARACTERS = 64
"""Of a client's name of a field, in logs and refusals: it may be anything."""
_PLACE = re.compile(r"\[\d+\]")


class UnknownFields:
    """Refuses unknown fields, or warns once per name, for a bounded number of names."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """Starts without a warning given; `is_strict` refuses."""
        self._is_strict = is_strict
        self._warned: set[str] = set()

    def note(self, fields: Fields, names: Sequence[str]) -> None:
        """Takes the names of unknown fields of an object.

        Raises:
            InvalidField: they are refused; it names the first one.
        """
        if names and self._is_strict:
            name = fields.path_of(_show_name(names[0]))
            raise InvalidField(name, JsonWord("an unknown one"), "a known field")
        for name in names:
            # Once for all messages: `messages.x`.
            shown = _PLACE.sub("", fields.path_of(_show_name(name)))
            if shown in self._warned or len(self._warned) >= MAX_WARNED:
                continue
            self._warned.add(shown)
            logger.warning("unknown request field ignored", extra={"field_id": shown})


def check_rest(fields: Fields, unknown: UnknownFields) -> None:
    """Checks the fields that no reader has asked for.

    Raises:
        InvalidField: one of them asks for what is not supported, or unknown ones are refused.
    """
    strange = []
    for name in fields.unread():
        if name in REFUSED:
            _refuse_unless_neutral(fields, name)
        elif name not in IGNORED:
            strange.append(name)
    unknown.note(fields, strange)


def check_inside(
    fields: Fields, unknown: UnknownFields, ignored: frozenset[str] = frozenset()
) -> None:
    """Checks, in an object inside of the body, the fields that no reader has asked for.

    Raises:
        InvalidField: unknown ones are refused.
    """
    unknown.note(fields, [name for name in fields.unread() if name not in ignored])


def _show_name(name: str) -> str:
    return safe_id(name[:MAX_NAME_CHARACTERS])


def _refuse_unless_neutral(fields: Fields, name: str) -> None:
    value = fields.raw(name)
    if value is None or any(_is_same(value, neutral) for neutral in REFUSED[name]):
        return
    allowed = " or ".join(["absent", *(repr(neutral) for neutral in REFUSED[name])])
    raise InvalidField(fields.path_of(name), brief(value), f"{allowed} in this release")


def _is_same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
