"""How rotary embeddings are stretched beyond the context that a model was trained on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Divides every frequency by one factor."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicScaling:
    """Raises the base with the length of the sequence (dynamic NTK).

    A key's rotation then depends on how long the sequence was when it was computed: the prompt is
    rotated for its whole length, each output token for the length up to and with itself. KV is
    therefore no function of the tokens before it, and prefixes must not be shared once a sequence
    may grow past `original_max_position`.
    """

    factor: float
    original_max_position: int
    """Sequences up to this length are not scaled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by a factor, keeps high ones and blends those between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Blends by the number of rotations within the original context (Peng et al., 2023)."""

    factor: float
    original_max_position: int
    attention_factor: float
    """Cosines and sines are multiplied by it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    has_whole_borders: bool = True
    """Whether the blended range starts and ends at whole dimensions."""


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling
