"""Turns a GGUF file into a model folder in Hugging Face layout, once.

Dequantising takes seconds and a gigabyte; every worker of every start would pay for it again.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader, quants
from safetensors.numpy import save_file

from pdserve.errors import ConfigError
from pdserve.models.gguf_tokenizer import GgufVocabulary, build_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

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
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Part of a block, and its name in a checkpoint; `.weight` or `.bias` follows."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes config, weights (float32) and tokenizer of a llama or qwen2 GGUF into `target`.

    Does nothing if `target` exists. The folder appears whole or not at all: it is written beside
    its place and renamed, so callers may race. The caller names the target after the file's digest.

    Raises:
        ConfigError: the file is no GGUF, or holds something that is not supported.
    """
    if target.is_dir():
        return
    metadata = _Metadata(gguf)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tensors = dict(_read_tensors(metadata))
        _write_config(metadata, tensors, staging)
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


class _Metadata:
    """Typed access to the fields of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{path}: is no readable GGUF file: {error}") from None
        self.architecture = self.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ConfigError(
                f"{path}: architecture {self.architecture!r} is not supported; known: {known}"
            )

    def find(self, name: str) -> object | None:
        """Returns a field's value, or None if the file has no such field."""
        field = self.reader.get_field(name)
        value: object = None if field is None else field.contents()
        return value

    def get(self, name: str) -> object:
        """Returns a field's value."""
        value = self.find(name)
        if value is None:
            raise ConfigError(f"{self.path}: field {name} is missing")
        return value

    def text(self, name: str) -> str:
        """Returns a string."""
        return str(self.get(name))

    def number(self, name: str) -> int:
        """Returns an integer field of the architecture."""
        value = self.get(f"{self.architecture}.{name}")
        if not isinstance(value, int):
            raise ConfigError(f"{self.path}: {name} must be an integer, got {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Returns a float32 field of the architecture as the decimal it was meant to be."""
        field = f"{self.architecture}.{name}"
        value = self.find(field) if default is not None else self.get(field)
        if value is None:
            value = default
        if not isinstance(value, int | float):
            raise ConfigError(f"{self.path}: {name} must be a number, got {value!r}")
        return float(str(np.float32(value)))

    def token_id(self, name: str) -> int | None:
        """Returns one of the tokenizer's special ids, if the file has it."""
        value = self.find(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) else None

    def sequence(self, name: str) -> list[object]:
        """Returns an array field."""
        value = self.get(name)
        if not isinstance(value, list):
            raise ConfigError(f"{self.path}: {name} must be an array")
        return value


def _read_tensors(metadata: _Metadata) -> Iterator[tuple[str, Array]]:
    num_heads = metadata.number("attention.head_count")
    num_kv_heads = metadata.number("attention.head_count_kv")
    heads_of = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for tensor in metadata.reader.tensors:
        name = str(tensor.name)
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        values = np.ascontiguousarray(values, dtype=np.float32)
        if name in OUTER_TENSORS:
            yield OUTER_TENSORS[name], values
            continue
        prefix, _, rest = name.partition(".")
        index, _, rest = rest.partition(".")
        part, _, kind = rest.partition(".")
        if prefix != "blk" or part not in LAYER_TENSORS or kind not in ("weight", "bias"):
            raise ConfigError(f"{metadata.path}: tensor {name} is not supported")
        if metadata.architecture == "llama" and part in heads_of:
            values = _unpermute(values, heads_of[part])
        yield f"model.layers.{index}.{LAYER_TENSORS[part]}.{kind}", values


def _unpermute(weight: Array, num_heads: int) -> Array:
    """Undoes llama.cpp's order of rotary rows (pairs side by side) for the half-split form."""
    shape = weight.shape
    pairs = weight.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(shape))


def _write_config(metadata: _Metadata, tensors: dict[str, Array], folder: Path) -> None:
    kind = metadata.find(f"{metadata.architecture}.rope.scaling.type")
    if kind not in (None, "none"):
        raise ConfigError(f"{metadata.path}: rope scaling {kind!r} is not supported")
    num_heads = metadata.number("attention.head_count")
    hidden_size = metadata.number("embedding_length")
    embedding = tensors.get("model.embed_tokens.weight")
    query = tensors.get("model.layers.0.self_attn.q_proj.weight")
    if embedding is None or query is None:
        raise ConfigError(f"{metadata.path}: token_embd.weight or blk.0.attn_q.weight is missing")
    bos_token_id, eos_token_id = (
        metadata.token_id("bos_token_id"),
        metadata.token_id("eos_token_id"),
    )
    config = {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv"),
        "head_dim": query.shape[0] // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real("rope.freq_base", default=10000.0),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": "float32",
    }
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(metadata: _Metadata, folder: Path) -> None:
    vocabulary = GgufVocabulary(
        model=metadata.text("tokenizer.ggml.model"),
        pre_tokenizer=str(metadata.find("tokenizer.ggml.pre") or "default"),
        tokens=[str(token) for token in metadata.sequence("tokenizer.ggml.tokens")],
        token_types=[int(str(kind)) for kind in metadata.sequence("tokenizer.ggml.token_type")],
        merges=[str(merge) for merge in metadata.sequence("tokenizer.ggml.merges")],
        bos_token_id=metadata.token_id("bos_token_id"),
        adds_bos=bool(metadata.find("tokenizer.ggml.add_bos_token")),
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
