"""Says in config.json's terms what the metadata of a GGUF file says of its model."""

import math
from collections.abc import Mapping

import numpy as np

from pdserve.errors import ConfigError
from pdserve.models.gguf_metadata import GgufMetadata

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
PERMUTED = ("llama", "smollm3")
"""Their converters put the two halves of a rotary pair side by side."""

ROPE_FREQUENCIES = "rope_freqs.weight"
LLAMA3_FIELDS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of every Llama 3.x; a GGUF file holds only the divisors that follow from them."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def require_architecture(metadata: GgufMetadata) -> None:
    """Checks that files of this architecture can be converted.

    Raises:
        ConfigError: they cannot.
    """
    if metadata.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"{metadata.path}: architecture {metadata.architecture!r} is not supported; "
            f"known: {known}"
        )


def is_permuted(metadata: GgufMetadata) -> bool:
    """Says whether rotary rows of queries and keys are stored pair by pair."""
    return metadata.architecture in PERMUTED


def config_of_gguf(
    metadata: GgufMetadata,
    shapes: Mapping[str, tuple[int, ...]],
    rope_frequencies: Array | None,
) -> dict[str, object]:
    """Returns the content of config.json.

    Args:
        metadata: of the file.
        shapes: of its tensors, under the names of a checkpoint.
        rope_frequencies: its divisors of rotary frequencies, if it has any.

    Raises:
        ConfigError: something is missing or not supported.
    """
    architecture = metadata.architecture
    embedding = shapes.get("model.embed_tokens.weight")
    query = shapes.get("model.layers.0.self_attn.q_proj.weight")
    if embedding is None or query is None:
        raise ConfigError(f"{metadata.path}: token_embd.weight or blk.0.attn_q.weight is missing")
    num_heads = metadata.number("attention.head_count")
    head_dim = query[0] // num_heads
    rotated = metadata.number("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        raise ConfigError(
            f"{metadata.path}: rope.dimension_count must be the head's {head_dim}, got {rotated}"
        )
    theta = metadata.real("rope.freq_base", default=10000.0)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": embedding[0],
        "hidden_size": metadata.number("embedding_length"),
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "bos_token_id": metadata.token_id("bos_token_id"),
        "eos_token_id": metadata.token_id("eos_token_id"),
        "torch_dtype": "float32",
    }
    scaling = _rope_scaling(metadata, head_dim, theta, rope_frequencies)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _biases(architecture, shapes) | _window(metadata)


def _biases(architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    layer = "model.layers.0"
    found: dict[str, object] = {}
    if architecture != "qwen2" and f"{layer}.self_attn.q_proj.bias" in shapes:
        found["attention_bias"] = True
    if f"{layer}.mlp.gate_proj.bias" in shapes:
        found["mlp_bias"] = True
    return found


def _window(metadata: GgufMetadata) -> dict[str, object]:
    """Turns a Llama with a sliding window into the Mistral that it is."""
    limit = metadata.number("context_length")
    window = metadata.number("attention.sliding_window", default=limit)
    if window in (0, limit) or window > limit:
        return {}
    if metadata.architecture != "llama":
        raise ConfigError(f"{metadata.path}: attention.sliding_window is not supported")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _rope_scaling(
    metadata: GgufMetadata, head_dim: int, theta: float, rope_frequencies: Array | None
) -> dict[str, object] | None:
    prefix = f"{metadata.architecture}.rope"
    kind = metadata.find(f"{prefix}.scaling.type")
    if kind is None and metadata.find(f"{prefix}.scale_linear") is not None:  # before GGUF v3
        factor = metadata.real("rope.scale_linear")
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind not in (None, "none", "linear", "yarn"):
        raise ConfigError(f"{metadata.path}: rope scaling {kind!r} is not supported")
    if rope_frequencies is not None:
        if kind not in (None, "none"):
            raise ConfigError(f"{metadata.path}: {ROPE_FREQUENCIES} beside {kind!r} scaling")
        return _llama3_scaling(metadata, head_dim, theta, rope_frequencies)
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn_scaling(metadata)
    return None


def _yarn_scaling(metadata: GgufMetadata) -> dict[str, object]:
    for name, neutral in (
        ("attn_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_log_multiplier", 0.0),
    ):
        value = metadata.real(f"rope.scaling.{name}", default=neutral)
        if value != neutral:
            raise ConfigError(f"{metadata.path}: rope.scaling.{name} {value} is not supported")
    return {
        "rope_type": "yarn",
        "factor": metadata.real("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.number("rope.scaling.original_context_length"),
        "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", default=1.0),
    }


def _llama3_scaling(
    metadata: GgufMetadata, head_dim: int, theta: float, divisors: Array
) -> dict[str, object] | None:
    """Finds the factor of Llama 3's scaling, the greatest divisor, and checks all of them by it."""
    factor = float(divisors.max())
    if np.all(divisors == 1):
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3_FIELDS["low_freq_factor"], LLAMA3_FIELDS["high_freq_factor"]
    original = LLAMA3_FIELDS["original_max_position_embeddings"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ConfigError(f"{metadata.path}: {ROPE_FREQUENCIES} is not that of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_FIELDS}
