"""Checks every field of a client's request and fills in the defaults.

Each refusal names the field, the value and the limit. Nothing is ignored.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import InvalidField, ModelNotFound, TooLong
from pdserve.request import SamplingParams
from pdserve.rpc.v1 import inference_pb2, types_pb2

DEFAULT_MAX_TOKENS = 256
"""Without max_tokens: this many, or what is left of the context if that is less."""
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROB_ENTRIES = 2**18
"""Prompt tokens x (alternatives + 1) of one request: about 4 MB until the client has read them."""
MAX_SAMPLES = 8
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4096
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
ROLES = ("system", "user", "assistant", "tool")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What the served model allows."""

    served_name: str
    vocab_size: int
    max_model_len: int
    """Prompt plus output, in tokens: the effective limit that GetModelInfo reports."""
    special_ids: frozenset[int]
    max_token_characters: int

    def within(self, held_tokens: int | None) -> "ModelLimits":
        """Returns the limits of workers that hold so many tokens, which may be fewer."""
        if held_tokens is None or held_tokens >= self.max_model_len:
            return self
        return replace(self, max_model_len=held_tokens)

    @property
    def max_prompt_characters(self) -> int:
        """A longer text cannot fit, whatever its tokens are."""
        return self.max_model_len * self.max_token_characters


def check_request_id(request_id: str) -> None:
    """Checks a client's own id; an empty one is replaced by the server.

    Raises:
        InvalidField: too long, or a character outside of [A-Za-z0-9._-].
    """
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidField("request_id", request_id, "at most 128 of [A-Za-z0-9._-]")


def check_model(name: str, limits: ModelLimits) -> None:
    """Checks the model's name.

    Raises:
        ModelNotFound: another model is asked for.
    """
    if name and name != limits.served_name:
        raise ModelNotFound(f"model {name[:128]!r} is not served, {limits.served_name!r} is")


def check_prompt_form(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """Checks what can be checked before any text is tokenized.

    Raises:
        InvalidField: no prompt, an empty one, an id outside of the vocabulary, an unknown role.
        TooLong: the prompt cannot fit.
    """
    form = request.WhichOneof("prompt")
    if form is None:
        raise InvalidField("prompt", None, "one of text, token_ids, chat")
    if form == "text":
        _check_text("text", request.text, limits)
    elif form == "token_ids":
        _check_ids("token_ids", request.token_ids.ids, limits)
    else:
        _check_messages(request.chat.messages, limits)


def _check_text(field: str, text: str, limits: ModelLimits) -> None:
    if not text:
        raise InvalidField(field, text, "at least one character")
    if len(text) > limits.max_prompt_characters:
        raise TooLong(
            field, len(text), f"at most {limits.max_prompt_characters} characters (they never fit)"
        )


def _check_ids(field: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    if not token_ids:
        raise InvalidField(field, [], "at least one token")
    largest = max(token_ids)
    if largest >= limits.vocab_size:
        raise InvalidField(field, largest, f"below the vocabulary size {limits.vocab_size}")


def _check_messages(messages: Sequence[inference_pb2.ChatMessage], limits: ModelLimits) -> None:
    if not messages:
        raise InvalidField("chat.messages", [], "at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidField("chat.messages", len(messages), f"at most {MAX_MESSAGES} messages")
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            field = f"chat.messages[{position}].role"
            raise InvalidField(field, message.role, f"one of {', '.join(ROLES)}")
    num_characters = sum(len(message.content) for message in messages)
    if num_characters > limits.max_prompt_characters:
        raise TooLong(
            "chat.messages", num_characters, f"at most {limits.max_prompt_characters} characters"
        )


def check_prompt_tokens(field: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Checks a tokenized prompt.

    Raises:
        InvalidField: no tokens, or nothing but one special token.
        TooLong: no room is left for one output token.
    """
    if not token_ids:
        raise InvalidField(field, [], "at least one token")
    if len(token_ids) == 1 and token_ids[0] in limits.special_ids:
        raise InvalidField(field, token_ids[0], "more than one special token")
    if len(token_ids) >= limits.max_model_len:
        raise TooLong(
            field,
            len(token_ids),
            f"at most {limits.max_model_len - 1} tokens (max_model_len {limits.max_model_len})",
        )


def check_sampling(
    wire: types_pb2.SamplingParams,
    num_prompt_tokens: int,
    limits: ModelLimits,
    draw_seed: Callable[[], int],
) -> SamplingParams:
    """Checks sampling parameters and fills in the defaults.

    Raises:
        InvalidField: a value is out of range or not supported.
        TooLong: prompt plus max_tokens exceed the limit.
    """
    max_tokens = _max_tokens(wire, num_prompt_tokens, limits)
    return SamplingParams(
        temperature=_real(wire, "temperature", wire.temperature, 1.0, (0.0, MAX_TEMPERATURE)),
        top_k=_whole(wire, "top_k", wire.top_k, 0, (0, MAX_TOP_K)),
        top_p=_top_p(wire),
        seed=wire.seed if wire.HasField("seed") else draw_seed(),
        max_tokens=max_tokens,
        min_tokens=_whole(wire, "min_tokens", wire.min_tokens, 0, (0, max_tokens)),
        stop=_stops(wire.stop),
        stop_token_ids=_stop_token_ids(wire.stop_token_ids, limits),
        ignore_eos=wire.ignore_eos,
        logprobs=(
            _whole(wire, "logprobs", wire.logprobs, 0, (0, MAX_LOGPROBS))
            if wire.HasField("logprobs")
            else None
        ),
        include_stop_in_output=wire.include_stop_in_output,
        skip_special_tokens=(
            wire.skip_special_tokens if wire.HasField("skip_special_tokens") else True
        ),
        min_p=_real(wire, "min_p", wire.min_p, 0.0, (0.0, 1.0)),
        presence_penalty=_penalty(wire, "presence_penalty", wire.presence_penalty),
        frequency_penalty=_penalty(wire, "frequency_penalty", wire.frequency_penalty),
        repetition_penalty=_real(
            wire,
            "repetition_penalty",
            wire.repetition_penalty,
            1.0,
            (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ),
        logit_bias=_logit_bias(wire.logit_bias, limits),
        prompt_logprobs=_prompt_logprobs(wire, num_prompt_tokens),
        echo=wire.echo,
        n=_whole(wire, "n", wire.n, 1, (1, MAX_SAMPLES)),
    )


def _max_tokens(wire: types_pb2.SamplingParams, num_prompt_tokens: int, limits: ModelLimits) -> int:
    left = limits.max_model_len - num_prompt_tokens
    assert left >= 1
    if not wire.HasField("max_tokens"):
        return min(DEFAULT_MAX_TOKENS, left)
    value = wire.max_tokens
    if value < 1:
        raise InvalidField("sampling.max_tokens", value, "at least 1")
    if value > left:
        raise TooLong(
            "sampling.max_tokens",
            value,
            f"at most {left} behind a prompt of {num_prompt_tokens} tokens "
            f"(max_model_len {limits.max_model_len})",
        )
    return value


def _real(
    wire: types_pb2.SamplingParams,
    name: str,
    value: float,
    default: float,
    bounds: tuple[float, float],
) -> float:
    if not _has(wire, name):
        return default
    low, high = bounds
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidField(f"sampling.{name}", value, f"from {low:g} to {high:g}")
    return value


def _whole(
    wire: types_pb2.SamplingParams, name: str, value: int, default: int, bounds: tuple[int, int]
) -> int:
    if not _has(wire, name):
        return default
    low, high = bounds
    if not low <= value <= high:
        raise InvalidField(f"sampling.{name}", value, f"from {low} to {high}")
    return value


def _has(wire: types_pb2.SamplingParams, name: str) -> bool:
    return any(field.name == name for field, _ in wire.ListFields())


def _penalty(wire: types_pb2.SamplingParams, name: str, value: float) -> float:
    return _real(wire, name, value, 0.0, (-MAX_PENALTY, MAX_PENALTY))


def _logit_bias(biases: Mapping[int, float], limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidField(field, len(biases), f"at most {MAX_LOGIT_BIASES} tokens")
    for token_id, bias in biases.items():
        if token_id >= limits.vocab_size:
            limit = f"for ids below the vocabulary size {limits.vocab_size}"
            raise InvalidField(field, token_id, limit)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            limit = f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise InvalidField(f"{field}[{token_id}]", bias, limit)
    return tuple(sorted(biases.items()))


def _prompt_logprobs(wire: types_pb2.SamplingParams, num_prompt_tokens: int) -> int | None:
    if not wire.HasField("prompt_logprobs"):
        return None
    name = "prompt_logprobs"
    value = _whole(wire, name, wire.prompt_logprobs, 0, (0, MAX_LOGPROBS))
    if num_prompt_tokens * (value + 1) > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidField(
            f"sampling.{name}",
            value,
            f"such that {num_prompt_tokens} prompt tokens times ({name} + 1) is at most "
            f"{MAX_PROMPT_LOGPROB_ENTRIES}",
        )
    return value


def _top_p(wire: types_pb2.SamplingParams) -> float:
    if not wire.HasField("top_p"):
        return 1.0
    if not math.isfinite(wire.top_p) or not 0.0 < wire.top_p <= 1.0:
        raise InvalidField("sampling.top_p", wire.top_p, "over 0 and at most 1")
    return wire.top_p


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidField("sampling.stop", len(stops), f"at most {MAX_STOPS} strings")
    for position, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            limit = f"of 1 to {MAX_STOP_CHARACTERS} characters"
            raise InvalidField(f"sampling.stop[{position}]", stop, limit)
    return tuple(stops)


def _stop_token_ids(token_ids: Sequence[int], limits: ModelLimits) -> tuple[int, ...]:
    field = "sampling.stop_token_ids"
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidField(field, len(token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids")
    if token_ids and max(token_ids) >= limits.vocab_size:
        limit = f"below the vocabulary size {limits.vocab_size}"
        raise InvalidField(field, max(token_ids), limit)
    return tuple(token_ids)
