"""Sampling fields of a body into the neutral form that the router checks for every protocol.

Ranges are not checked here but in `router.validation`, which names its fields as gRPC does;
`shown_as` gives an error the name that the HTTP client used.
"""

import re
from collections.abc import Mapping

from pdserve.errors import InvalidField
from pdserve.rpc.v1 import types_pb2
from router.openai.fields import INT64, Fields, as_ids, as_number, as_text, as_whole, brief
from router.validation import MAX_STOP_TOKEN_IDS, MAX_STOPS

MAX_LOGIT_BIAS = 1024
_SEED_BOUNDS = (INT64[0], 2**64 - 1)
_PARAMS = {
    "sampling.include_stop_in_output": "include_stop_str_in_output",
    "chat.messages": "messages",
    "chat": "messages",
    "text": "prompt",
    "token_ids": "prompt",
}
_HEAD = re.compile(r"((?:sampling\.|chat\.)?[a-z_]+)(.*)", re.DOTALL)


def read_sampling(fields: Fields) -> types_pb2.SamplingParams:
    """Reads what chat and completions have in common, but for lengths and log-probs.

    Raises:
        InvalidField: a field has the wrong type, or more entries than can be.
    """
    top_k = fields.whole("top_k")
    seed = fields.whole("seed", _SEED_BOUNDS)
    stop_ids = fields.items("stop_token_ids", MAX_STOP_TOKEN_IDS)
    return types_pb2.SamplingParams(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        # vLLM's way to say "off".
        top_k=0 if top_k == -1 else top_k,
        min_p=fields.number("min_p"),
        # A negative seed of OpenAI's int64 keeps its 64 bits.
        seed=None if seed is None else seed % 2**64,
        n=fields.whole("n"),
        stop=_stops(fields),
        stop_token_ids=None if stop_ids is None else as_ids("stop_token_ids", stop_ids),
        min_tokens=fields.whole("min_tokens", INT64),
        ignore_eos=fields.flag("ignore_eos"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
        logit_bias=_logit_bias(fields),
        include_stop_in_output=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens"),
        prompt_logprobs=fields.whole("prompt_logprobs"),
    )


def _stops(fields: Fields) -> list[str] | None:
    value = fields.raw("stop")
    if value is None:
        return None
    if isinstance(value, str):
        return [as_text("stop", value)]
    if not isinstance(value, list):
        raise InvalidField("stop", brief(value), "a string or a list of strings")
    items = fields.items("stop", MAX_STOPS) or []
    return [as_text(f"stop[{position}]", one) for position, one in enumerate(items)]


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    value = fields.raw("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidField("logit_bias", brief(value), "an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidField("logit_bias", len(value), f"at most {MAX_LOGIT_BIAS} entries")
    bias = {}
    for name, amount in value.items():
        if not re.fullmatch(r"[0-9]{1,10}", name):
            raise InvalidField("logit_bias", brief(name), "an object whose names are token ids")
        token_id = as_whole("logit_bias", int(name), (0, 2**32 - 1))
        bias[token_id] = as_number(f"logit_bias[{token_id}]", amount)
    return bias


def shown_as(error: InvalidField, names: Mapping[str, str]) -> InvalidField:
    """Names a field the way the HTTP client did: `sampling.top_p` is `top_p` here.

    Args:
        error: of the checks that all protocols share.
        names: this request's own names, such as `prompt[3]` for `text`.
    """
    match = _HEAD.match(error.field)
    if error.field in names:
        return error.renamed(names[error.field])
    if match is None:
        return error
    head, rest = match[1], match[2]
    shown = names.get(head) or _PARAMS.get(head) or head.removeprefix("sampling.")
    return error.renamed(shown + rest)


def own_names(fields: Fields) -> dict[str, str]:
    """Returns names that depend on how a client wrote something: a stop string may be no list."""
    return {"sampling.stop[0]": "stop"} if isinstance(fields.raw("stop"), str) else {}
