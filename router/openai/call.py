"""A parsed generation call: what to run and how to answer, whichever endpoint it came by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.errors import InvalidField
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.openai.compatibility import (
    IGNORED_IN_STREAM_OPTIONS,
    UnknownFields,
    check_inside,
)
from router.openai.fields import Fields
from router.prompt import PromptOptions

MAX_PROMPTS = 256
"""Prompts of one call."""
MAX_CACHE_SALT_CHARACTERS = 256


class Shape(Protocol):
    """What an endpoint's choices look like. One instance per call: it may count as it goes."""

    object_name: str
    """Of a whole answer."""
    chunk_object_name: str
    """Of a streamed chunk."""
    id_prefix: str

    def opening(self, choice: int) -> dict[str, object] | None:
        """Returns the first chunk's choice; None when there is nothing to say."""
        ...

    def prompt(self, choice: int, chunk: inference_pb2.PromptChunk) -> dict[str, object] | None:
        """Returns a choice that tells of its prompt, before any output; None when it does not."""
        ...

    def beside(self, chunk: inference_pb2.PromptChunk) -> dict[str, object]:
        """Returns what a chunk tells of its prompt beside its choices."""
        ...

    def delta(self, choice: int, chunk: inference_pb2.TokenChunk) -> dict[str, object]:
        """Returns new output."""
        ...

    def finish(self, choice: int, finish: inference_pb2.SampleFinish) -> dict[str, object]:
        """Returns the end of a choice, without any output."""
        ...

    def whole(self, choice: int, outcome: "Outcome") -> dict[str, object]:
        """Returns a choice of an answer that is not streamed; encoded with `json_parts`."""
        ...

    def whole_beside(self, prompt: inference_pb2.PromptChunk) -> dict[str, object]:
        """Returns what such an answer tells of its prompt beside its choices."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One sample, whole."""

    prompt: inference_pb2.PromptChunk
    """All that was to be told of it."""
    output: inference_pb2.TokenChunk
    finish: inference_pb2.SampleFinish


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """What a stream carries beside its output."""

    has_usage: bool = False
    """One last chunk tells what was used."""
    has_continuous_usage: bool = False
    """Every chunk does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One POST of a client."""

    wires: tuple[inference_pb2.GenerateRequest, ...]
    """One request per prompt, nothing checked yet; ids are still missing."""
    prompt_names: tuple[str, ...]
    """What the client calls each prompt."""
    names: Mapping[str, str]
    """The client's names of fields, where they depend on the call."""
    num_samples: int
    shape: Shape
    options: PromptOptions = field(default_factory=PromptOptions)
    is_streaming: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)


def read_stream_options(fields: Fields, unknown: UnknownFields) -> tuple[bool, StreamOptions]:
    """Reads `stream` and `stream_options`.

    Raises:
        InvalidField: options without a stream, or one that is not known while that is refused.
    """
    is_streaming = fields.flag("stream") or False
    options = fields.inner("stream_options")
    if options is None:
        return is_streaming, StreamOptions()
    if not is_streaming:
        raise InvalidField("stream_options", "options", "absent unless stream is true")
    found = StreamOptions(
        has_usage=options.flag("include_usage") or False,
        has_continuous_usage=options.flag("continuous_usage_stats") or False,
    )
    check_inside(options, unknown, IGNORED_IN_STREAM_OPTIONS)
    return True, found


def read_prompt_options(fields: Fields, *, is_chat: bool) -> PromptOptions:
    """Reads what decides how a prompt becomes tokens."""
    cache_salt = fields.text("cache_salt") or ""
    if len(cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        limit = f"at most {MAX_CACHE_SALT_CHARACTERS} characters"
        raise InvalidField("cache_salt", len(cache_salt), limit)
    wants_opening = fields.flag("add_generation_prompt") if is_chat else None
    return PromptOptions(
        add_special_tokens=fields.flag("add_special_tokens"),
        add_generation_prompt=wants_opening is not False,
        cache_salt=cache_salt,
    )


def skips_special_tokens(sampling: types_pb2.SamplingParams) -> bool:
    """Says whether text leaves special tokens out, which is the default."""
    return not sampling.HasField("skip_special_tokens") or sampling.skip_special_tokens


def num_samples_of(sampling: types_pb2.SamplingParams) -> int:
    """Returns n; what is no number of samples is refused when the request is checked."""
    return max(sampling.n, 1) if sampling.HasField("n") else 1
