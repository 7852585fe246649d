"""Reads what a model is from its folder in Hugging Face layout. No torch: routers read it too."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

from pdserve.config.engine import EngineConfig
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.rope import DynamicScaling
from pdserve.config.shape import check_parallel
from pdserve.errors import ConfigError
from pdserve.models.config_json import Json, read_json, read_optional_id
from pdserve.models.families import read_shape

logger = logging.getLogger(__name__)

REVISION_SAMPLES = 32
"""Pages of each weight file that enter the revision: fine-tunes share names, sizes and headers."""
REVISION_PAGE_BYTES = 4096


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json.

    Raises:
        ConfigError: a file or field is missing, or the model needs something not supported; the
            text names the file and the field.
    """
    path = folder / "config.json"
    raw = read_json(path)
    return replace(
        read_shape(raw, path),
        eos_token_ids=_eos_token_ids(folder, raw),
        bos_token_id=read_optional_id(raw, "bos_token_id", path),
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
        if engine.device != "cpu":  # each kind of device draws numbers of its own
            revision = f"{revision}-{engine.device}"
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
            f"max_model_len must be at most the model's {config.max_position}, got {max_model_len}",
            settings=("max_model_len",),
        )
    return max_model_len


def effective_engine(config: ModelConfig, engine: EngineConfig) -> EngineConfig:
    """Returns the settings that a model can be run with.

    Prefixes are not shared where KV depends on more than the tokens before it.
    """
    scaling = config.rope_scaling
    if not isinstance(scaling, DynamicScaling) or not engine.enable_prefix_caching:
        return engine
    if effective_max_model_len(config, engine.max_model_len) <= scaling.original_max_position:
        return engine
    logger.warning(
        "prefix caching is off: dynamic rope scaling rotates keys by the sequence's length",
        extra={"original_max_position": scaling.original_max_position},
    )
    return replace(engine, enable_prefix_caching=False)


def list_weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the folder's safetensors files, sorted by name."""
    return tuple(sorted(folder.glob("*.safetensors")))


def _eos_token_ids(folder: Path, raw: Json) -> tuple[int, ...]:
    """Takes the ids of generation_config.json where it has any, else those of config.json."""
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
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
