"""What was measured of a kind of worker once, as a file: a predictor starts from it."""

import json
from dataclasses import asdict, dataclass, field, fields

from pdserve.errors import ConfigError


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


def profile_from_json(text: str) -> Profile:
    """Reads a file's text.

    Raises:
        ConfigError: it is no profile; the text names the field.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"profile is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError("profile must be one JSON object")
    known = {one.name for one in fields(Profile)}
    unknown = sorted(data.keys() - known)
    if unknown:
        raise ConfigError(f"profile has unknown fields: {', '.join(unknown)}")
    for name, count in (("prefill", 3), ("decode", 3), ("transfer", 2)):
        data[name] = _read_law(name, data.get(name), count)
    for name in ("kv_bytes_per_token", "kv_tokens"):
        if not isinstance(data.get(name), int) or data[name] <= 0:
            raise ConfigError(f"profile: {name} must be a positive number, got {data.get(name)!r}")
    if not isinstance(data.get("worker_class"), str):
        raise ConfigError(f"profile: worker_class must be a text, got {data.get('worker_class')!r}")
    return Profile(**data)


def _read_law(name: str, value: object, count: int) -> tuple[float, ...]:
    is_law = (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(one, int | float) and 0 <= one < float("inf") for one in value)
        and any(value)
    )
    if not is_law:
        raise ConfigError(f"profile: {name} must be {count} numbers of at least 0, got {value!r}")
    assert isinstance(value, list)
    return tuple(float(one) for one in value)
