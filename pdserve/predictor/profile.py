"""What was measured of a kind of worker once, as a file: a predictor starts from it."""

import json
import reprlib
from dataclasses import asdict, dataclass, field, fields

from pdserve.errors import ConfigError

_COUNTS = {
    "kv_bytes_per_token": 1,
    "kv_tokens": 1,
    "num_gpus": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
}
"""Whole numbers, and the least of each."""
_REQUIRED = ("kv_bytes_per_token", "kv_tokens")
_MOST_COUNT = 2**40
_MOST_S = 3600.0
"""Of each coefficient: no step takes hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Laws of one kind of worker, and what it can hold.

    A prompt's step:  prefill_s = p0 + p1 * tokens + p2 * tokens * (context + tokens / 2)
    A decode step:    decode_s  = d0 + d1 * sequences + d2 * KV tokens
    A hand-off:       transfer_s = t0 + t1 * bytes
    """

    worker_class: str
    """Device, model, dtype and shape, in one word for each: workers of one class are alike."""
    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    transfer: tuple[float, float]
    kv_bytes_per_token: int
    kv_tokens: int
    """That the worker's cache holds."""
    num_gpus: int = 1
    """That a replica takes; 0 on a CPU."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    detail: dict[str, str] = field(default_factory=dict)
    """Device, versions, date."""

    def prefill_s(self, num_tokens: float, num_context_tokens: float) -> float:
        """Returns the seconds of a step that computes a piece of a prompt."""
        p0, p1, p2 = self.prefill
        return p0 + p1 * num_tokens + p2 * num_tokens * (num_context_tokens + num_tokens / 2)

    def decode_step_s(self, num_sequences: float, num_kv_tokens: float) -> float:
        """Returns the seconds of a step that computes one token for each sequence."""
        d0, d1, d2 = self.decode
        return d0 + d1 * num_sequences + d2 * num_kv_tokens

    def transfer_s(self, num_bytes: float) -> float:
        """Returns the seconds of a hand-off by itself."""
        return self.transfer[0] + self.transfer[1] * num_bytes

    def to_json(self) -> str:
        """Returns the file's text."""
        return json.dumps(asdict(self), indent=2) + "\n"


def profile_from_json(text: str, source: str = "profile") -> Profile:
    """Reads a file's text.

    Args:
        text: JSON.
        source: what refusals call it, with the file's name.

    Raises:
        ConfigError: it is no profile; the text names source and field.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{source} is no JSON object: {where} is no JSON") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{source} is no JSON object that can be read") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must be one JSON object")
    known = {one.name for one in fields(Profile)}
    unknown = sorted(data.keys() - known)
    if unknown:
        raise ConfigError(f"{source} has unknown fields: {reprlib.repr(unknown)}")
    for name, count in (("prefill", 3), ("decode", 3), ("transfer", 2)):
        data[name] = _read_law(source, name, data.get(name), count)
    for name, least in _COUNTS.items():
        if name in data or name in _REQUIRED:
            _check_count(source, name, data.get(name), least)
    if not isinstance(data.get("worker_class"), str):
        raise _refuse(source, "worker_class", "a text", data.get("worker_class"))
    detail = data.get("detail", {})
    if not isinstance(detail, dict) or not all(isinstance(one, str) for one in detail.values()):
        raise _refuse(source, "detail", "an object of texts", detail)
    return Profile(**data)


def _check_count(source: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_COUNT:
        raise _refuse(source, name, f"a whole number from {least} to {_MOST_COUNT}", value)


def _read_law(source: str, name: str, value: object, count: int) -> tuple[float, ...]:
    is_law = (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value)
        and all(0 <= one <= _MOST_S for one in value)
        and any(value)
    )
    if not is_law:
        wanted = f"{count} numbers from 0 to {_MOST_S:g} (seconds) that are not all 0"
        raise _refuse(source, name, wanted, value)
    assert isinstance(value, list)
    return tuple(float(one) for one in value)


def _refuse(source: str, name: str, wanted: str, value: object) -> ConfigError:
    got = "nothing" if value is None else reprlib.repr(value)
    return ConfigError(f"{source}: {name} must be {wanted}, got {got}")
