"""What tells the families of Llama-like models apart, read from config.json.

Defaults for absent fields are those of transformers, which leaves out what equals its defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.config.model import ModelConfig
from pdserve.config.rope import DynamicScaling
from pdserve.errors import ConfigError
from pdserve.models.config_json import Json, read_flag, read_number, read_positive
from pdserve.models.rope_config import read_rope_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture of transformers."""

    name: str
    has_qkv_bias: bool = False
    """Always; where it is a choice, `may_have_attention_bias` is set."""
    may_have_attention_bias: bool = False
    may_have_mlp_bias: bool = False
    has_qk_norm: bool = False
    head_dim: int | None = None
    """Where config.json names none; None divides the hidden size by the heads."""
    is_tied: bool = False
    rope_theta: float = 10000.0
    default_window: int | None = None


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(name="llama", may_have_attention_bias=True, may_have_mlp_bias=True),
    "MistralForCausalLM": Family(name="mistral", default_window=4096),
    "Qwen2ForCausalLM": Family(name="qwen2", has_qkv_bias=True, default_window=4096),
    "Qwen3ForCausalLM": Family(
        name="qwen3",
        may_have_attention_bias=True,
        has_qk_norm=True,
        head_dim=128,
        default_window=4096,
    ),
    "SmolLM3ForCausalLM": Family(
        name="smollm3",
        may_have_attention_bias=True,
        may_have_mlp_bias=True,
        is_tied=True,
        rope_theta=2_000_000.0,
    ),
}
"""By the name in config.json."""

WINDOWED, FULL = "sliding_attention", "full_attention"
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_NOPE_INTERVAL = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Windows:
    size: int | None = None
    layers: frozenset[int] = frozenset()


def read_shape(raw: Json, path: Path) -> ModelConfig:
    """Returns a configuration without ids and revision.

    Raises:
        ConfigError: a field is missing, or the model needs something not supported.
    """
    family = _family(raw, path)
    _refuse_unsupported(raw, family, path)
    num_layers = read_positive(raw, "num_hidden_layers", path)
    num_heads = read_positive(raw, "num_attention_heads", path)
    num_kv_heads = read_positive(raw, "num_key_value_heads", path, default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads "
            f"{num_kv_heads}, got {num_heads}"
        )
    hidden_size = read_positive(raw, "hidden_size", path)
    head_dim = read_positive(
        raw, "head_dim", path, default=family.head_dim or max(1, hidden_size // num_heads)
    )
    rope = read_rope_config(raw, path, family.rope_theta)
    _check_head_dim(head_dim, isinstance(rope.scaling, DynamicScaling), path)
    windows = _read_windows(raw, family, num_layers, path)
    has_attention_bias = family.may_have_attention_bias and read_flag(raw, "attention_bias", path)
    return ModelConfig(
        architecture=family.name,
        vocab_size=read_positive(raw, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=read_positive(raw, "intermediate_size", path),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=rope.theta,
        rms_norm_eps=read_number(raw, "rms_norm_eps", path),
        max_position=rope.max_position,
        has_tied_embeddings=read_flag(raw, "tie_word_embeddings", path, default=family.is_tied),
        has_qkv_bias=family.has_qkv_bias or has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=family.may_have_mlp_bias and read_flag(raw, "mlp_bias", path),
        has_qk_norm=family.has_qk_norm,
        rope_scaling=rope.scaling,
        sliding_window=windows.size,
        windowed_layers=windows.layers,
        unrotated_layers=_unrotated_layers(raw, family, num_layers, path),
        eos_token_ids=(),
    )


def _family(raw: Json, path: Path) -> Family:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"{path}: architectures must be a list of one name, got {names!r}")
    if names[0] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{path}: architecture {names[0]!r} is not supported; known: {known}")
    return FAMILIES[names[0]]


def _refuse_unsupported(raw: Json, family: Family, path: Path) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{path}: hidden_act must be silu, got {activation!r}")
    refused = ["quantization_config", "auto_map"]
    if not family.may_have_mlp_bias:
        refused.append("mlp_bias")
    if not (family.may_have_attention_bias or family.has_qkv_bias):
        refused.append("attention_bias")
    for name in refused:
        if raw.get(name):
            raise ConfigError(f"{path}: {name} is not supported")
    factor = raw.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor must be 1.0, got {factor!r}")


def _check_head_dim(head_dim: int, is_dynamic: bool, path: Path) -> None:
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    if is_dynamic and head_dim < 4:
        raise ConfigError(
            f"{path}: head_dim must be at least 4 for dynamic rope scaling, got {head_dim}"
        )


def _read_windows(raw: Json, family: Family, num_layers: int, path: Path) -> _Windows:
    """Finds the layers with a sliding window; a null window means none."""
    has_window = raw.get("sliding_window", family.default_window) is not None
    size = (
        read_positive(raw, "sliding_window", path, default=family.default_window)
        if has_window
        else None
    )
    if family.name == "llama":
        limit = raw.get("max_position_embeddings")
        if size is not None and isinstance(limit, int) and size < limit:
            # transformers computes it without, other engines with one: refuse what is unclear.
            raise ConfigError(f"{path}: sliding_window is not supported for Llama, got {size}")
        return _Windows()
    if family.name != "mistral" and not read_flag(raw, "use_sliding_window", path):
        size = None
    if size is None:
        return _Windows()
    if family.name == "mistral":
        return _Windows(size=size, layers=frozenset(range(num_layers)))
    layers = _windowed_layers(raw, family, num_layers, path)
    return _Windows(size=size if layers else None, layers=layers)


def _windowed_layers(raw: Json, family: Family, num_layers: int, path: Path) -> frozenset[int]:
    kinds = raw.get("layer_types")
    if kinds is None:
        if family.name == "smollm3":
            return _unrotated_layers(raw, family, num_layers, path)
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ConfigError(
                f"{path}: max_window_layers must be a number of layers, got {first!r}"
            )
        return frozenset(range(first, num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (WINDOWED, FULL) for kind in kinds)
    ):
        raise ConfigError(
            f"{path}: layer_types must name {WINDOWED} or {FULL} for each of {num_layers} layers"
        )
    return frozenset(index for index, kind in enumerate(kinds) if kind == WINDOWED)


def _unrotated_layers(raw: Json, family: Family, num_layers: int, path: Path) -> frozenset[int]:
    """Finds the layers without rotary embeddings; the list of SmolLM3 says 1 where there are."""
    if family.name != "smollm3":
        return frozenset()
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        interval = read_positive(raw, "no_rope_layer_interval", path, default=DEFAULT_NOPE_INTERVAL)
        return frozenset(range(interval - 1, num_layers, interval))
    if (
        not isinstance(rotated, list)
        or len(rotated) < num_layers
        or any(flag not in (0, 1) for flag in rotated)
    ):
        raise ConfigError(f"{path}: no_rope_layers must be 0 or 1 for each of {num_layers} layers")
    return frozenset(index for index in range(num_layers) if not rotated[index])
