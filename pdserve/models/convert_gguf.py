"""Turns a GGUF file into a model folder in Hugging Face layout, once.

Dequantising takes seconds and a gigabyte; every worker of every start would pay for it again.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf import ReaderTensor, quants
from safetensors.numpy import save_file

from pdserve.errors import ConfigError
from pdserve.models.gguf_config import (
    ROPE_FREQUENCIES,
    config_of_gguf,
    is_permuted,
    require_architecture,
)
from pdserve.models.gguf_metadata import GgufMetadata
from pdserve.models.gguf_tokenizer import GgufVocabulary, build_tokenizer

OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Part of a block, and its name in a checkpoint; `.weight` or `.bias` follows."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes config, weights (float32) and tokenizer of a GGUF file into `target`.

    Does nothing if `target` exists. The folder appears whole or not at all: it is written beside
    its place and renamed, so callers may race. The caller names the target after the file's digest.

    Raises:
        ConfigError: the file is no GGUF, or holds something that is not supported.
    """
    if target.is_dir():
        return
    metadata = GgufMetadata(gguf)
    require_architecture(metadata)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tensors = dict(_read_tensors(metadata))
        rope_frequencies = tensors.pop(ROPE_FREQUENCIES, None)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        _write_config(config_of_gguf(metadata, shapes, rope_frequencies), staging)
        _write_tokenizer(metadata, staging)
        weights = staging / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # made private by the library, as the folder was by mkdtemp
        staging.chmod(0o755)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # else another caller was first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _read_tensors(metadata: GgufMetadata) -> Iterator[tuple[str, Array]]:
    num_heads = metadata.number("attention.head_count")
    num_kv_heads = metadata.number("attention.head_count_kv", default=num_heads)
    heads_of = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for tensor in metadata.reader.tensors:
        name = str(tensor.name)
        if name == ROPE_FREQUENCIES:
            yield name, _dequantize(tensor, metadata)
            continue
        if name in OUTER_TENSORS:
            yield OUTER_TENSORS[name], _dequantize(tensor, metadata)
            continue
        prefix, _, rest = name.partition(".")
        index, _, rest = rest.partition(".")
        part, _, kind = rest.partition(".")
        if prefix != "blk" or part not in LAYER_TENSORS or kind not in ("weight", "bias"):
            raise ConfigError(f"{metadata.path}: tensor {name} is not supported")
        values = _dequantize(tensor, metadata)
        if part in heads_of and is_permuted(metadata):
            values = _unpermute(values, heads_of[part])
        yield f"model.layers.{index}.{LAYER_TENSORS[part]}.{kind}", values


def _dequantize(tensor: ReaderTensor, metadata: GgufMetadata) -> Array:
    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        kind = tensor.tensor_type.name
        raise ConfigError(
            f"{metadata.path}: tensor {tensor.name} of type {kind} cannot be read: {error}"
        ) from None
    return np.ascontiguousarray(values, dtype=np.float32)


def _unpermute(weight: Array, num_heads: int) -> Array:
    """Undoes llama.cpp's order of rotary rows (pairs side by side) for the half-split form."""
    shape = weight.shape
    pairs = weight.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(shape))


def _write_config(config: Mapping[str, object], folder: Path) -> None:
    _write_json(folder / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(metadata: GgufMetadata, folder: Path) -> None:
    merges = metadata.find("tokenizer.ggml.merges")
    scores = metadata.find("tokenizer.ggml.scores")
    adds_bos = metadata.find("tokenizer.ggml.add_bos_token")
    vocabulary = GgufVocabulary(
        model=metadata.text("tokenizer.ggml.model"),
        pre_tokenizer=str(metadata.find("tokenizer.ggml.pre") or "default"),
        tokens=[str(token) for token in metadata.sequence("tokenizer.ggml.tokens")],
        token_types=[int(str(kind)) for kind in metadata.sequence("tokenizer.ggml.token_type")],
        merges=[str(merge) for merge in merges] if isinstance(merges, list) else None,
        scores=[float(score) for score in scores] if isinstance(scores, list) else None,
        bos_token_id=metadata.token_id("bos_token_id"),
        unknown_token_id=metadata.token_id("unknown_token_id"),
        adds_bos=None if adds_bos is None else bool(adds_bos),
        adds_space_prefix=metadata.find("tokenizer.ggml.add_space_prefix") is not False,
    )
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = metadata.token_id(f"{name}_token_id")
        if token_id is not None:
            key = {"unknown": "unk", "padding": "pad"}.get(name, name)
            settings[f"{key}_token"] = vocabulary.tokens[token_id]
    template = metadata.find("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = str(template)
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
