"""Reads what a model is from its folder in Hugging Face layout. No torch: routers read it too."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pdserve.config.engine import EngineConfig
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.shape import check_parallel
from pdserve.errors import ConfigError

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
}
"""Names in config.json, and the family each is computed as."""

REVISION_SAMPLES = 32
"""Pages of each weight file that enter the revision: fine-tunes share names, sizes and headers."""
REVISION_PAGE_BYTES = 4096

Json = dict[str, object]


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json.

    Raises:
        ConfigError: a file or field is missing, or the model needs something not supported; the
            text names the file and the field.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    architecture = _architecture(raw, path)
    _refuse_unsupported(raw, architecture, path)
    num_heads = _positive(raw, "num_attention_heads", path)
    hidden_size = _positive(raw, "hidden_size", path)
    num_kv_heads = _positive(raw, "num_key_value_heads", path, default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads "
            f"{num_kv_heads}, got {num_heads}"
        )
    head_dim = _positive(raw, "head_dim", path, default=hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    is_tied = raw.get("tie_word_embeddings", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size", path),
        num_layers=_positive(raw, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=_rope_theta(raw, path),
        rms_norm_eps=_number(raw, "rms_norm_eps", path),
        max_position=_positive(raw, "max_position_embeddings", path),
        has_tied_embeddings=bool(is_tied),
        has_qkv_bias=architecture == "qwen2",
        eos_token_ids=_eos_token_ids(folder, raw),
        bos_token_id=_optional_id(raw, "bos_token_id", path),
        revision=_revision(folder, raw),
    )


def require_tokenizer(folder: Path) -> Path:
    """Returns the path of tokenizer.json.

    Raises:
        ConfigError: the folder has none.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no tokenizer.json; a served model needs one")
    return path


def geometry_of(config: ModelConfig, engine: EngineConfig) -> KvGeometry:
    """Returns the shape of KV blocks that an engine with these settings keeps.

    Raises:
        ConfigError: so many ranks cannot share this model; the text names the field.
    """
    check_parallel(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_heads=config.num_heads,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
    )
    revision = config.revision
    if engine.load_format == "dummy":
        revision = f"{revision}-dummy-{engine.seed}"
    return KvGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=engine.block_size,
        dtype=engine.dtype,
        model_revision=revision,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
    )


def effective_max_model_len(config: ModelConfig, max_model_len: int | None) -> int:
    """Returns the longest prompt plus output, in tokens.

    Raises:
        ConfigError: the wish exceeds what the model was made for.
    """
    if max_model_len is None:
        return config.max_position
    if max_model_len > config.max_position:
        raise ConfigError(
            f"max_model_len must be at most the model's {config.max_position}, got {max_model_len}"
        )
    return max_model_len


def list_weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the folder's safetensors files, sorted by name."""
    return tuple(sorted(folder.glob("*.safetensors")))


def _read_json(path: Path) -> Json:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: must hold an object")
    return parsed


def _architecture(raw: Json, path: Path) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"{path}: architectures must be a list of one name, got {names!r}")
    if names[0] not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"{path}: architecture {names[0]!r} is not supported; known: {known}")
    return ARCHITECTURES[names[0]]


def _refuse_unsupported(raw: Json, architecture: str, path: Path) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{path}: hidden_act must be silu, got {activation!r}")
    refused = ["quantization_config", "auto_map", "mlp_bias"]
    if architecture == "llama":
        refused.append("attention_bias")
    for name in refused:
        if raw.get(name):
            raise ConfigError(f"{path}: {name} is not supported")
    window = raw.get("sliding_window")
    uses_window = raw.get("use_sliding_window", architecture != "qwen2")
    limit = raw.get("max_position_embeddings")
    is_narrow = isinstance(window, int) and isinstance(limit, int) and window < limit
    if uses_window and is_narrow:
        raise ConfigError(f"{path}: sliding_window is not supported, got {window}")
    factor = raw.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor must be 1.0, got {factor!r}")


def _rope_theta(raw: Json, path: Path) -> float:
    """Reads the base from rope_parameters (transformers 5) or from the top level (before)."""
    for name in ("rope_parameters", "rope_scaling"):
        scaling = raw.get(name)
        if scaling is None:
            continue
        if not isinstance(scaling, dict):
            raise ConfigError(f"{path}: {name} must be an object, got {scaling!r}")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{path}: rope scaling {kind!r} is not supported")
        if "rope_theta" in scaling:
            return _number(scaling, "rope_theta", path)
    return _number(raw, "rope_theta", path, default=10000.0)


def _positive(raw: Json, name: str, path: Path, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{path}: {name} is missing")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {name} must be an integer of at least 1, got {value!r}")
    return value


def _number(raw: Json, name: str, path: Path, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{path}: {name} is missing")
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{path}: {name} must be a number over 0, got {value!r}")
    return float(value)


def _optional_id(raw: Json, name: str, path: Path) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{path}: {name} must be a token id, got {value!r}")
    return value


def _eos_token_ids(folder: Path, raw: Json) -> tuple[int, ...]:
    """Takes the ids of generation_config.json where it has any, else those of config.json."""
    path = folder / "generation_config.json"
    value = _read_json(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        path = folder / "config.json"
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ConfigError(f"{path}: eos_token_id must be token ids, got {value!r}")
    return tuple(ids)


def _revision(folder: Path, raw: Json) -> str:
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    for path in list_weight_files(folder):
        size = path.stat().st_size
        digest.update(f"\x00{path.name}\x00{size}\x00".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for sample in range(REVISION_SAMPLES):
                file.seek(size * sample // REVISION_SAMPLES)
                digest.update(file.read(REVISION_PAGE_BYTES))
    return digest.hexdigest()[:32]
