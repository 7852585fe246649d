"""Writes model folders as GGUF files, in any type of tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pdserve.config.model import ModelConfig
from pdserve.models.convert_gguf import LAYER_TENSORS, OUTER_TENSORS
from pdserve.models.folder import read_model_config
from tests.support.tiny_models import CHAT_TEMPLATE

PERMUTED = ("llama", "smollm3")

K_BLOCKS = {
    GGMLQuantizationType.Q4_K: (144, (0, 2)),
    GGMLQuantizationType.Q5_K: (176, (0, 2)),
    GGMLQuantizationType.Q6_K: (210, (208,)),
}
"""Types that gguf reads but does not write: bytes of 256 values, and where float16 scales lie."""


def write_gguf(
    path: Path,
    source: Path,
    pre_tokenizer: str = "gpt-2",
    *,
    architecture: str | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extend: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Writes a model folder as GGUF.

    Args:
        path: of the file.
        source: the folder.
        pre_tokenizer: its name in llama.cpp's table.
        architecture: to claim another one than the folder's.
        kind: type of the products' weights; of the K types, whose bytes are drawn at random.
        extend: adds fields and tensors.
    """
    config = read_model_config(source)
    family = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, architecture or family)
    _add_shape(writer, config)
    _add_tokenizer(writer, source, pre_tokenizer)
    generator = np.random.default_rng(0)
    for name, values in _named_tensors(source, config, family).items():
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        elif kind in K_BLOCKS:
            raw = draw_blocks(kind, values.shape, generator)
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    if extend is not None:
        extend(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def draw_blocks(
    kind: GGMLQuantizationType, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """Draws the bytes of a K-quantised weight, with scales that give values of about 0.1."""
    block_bytes, scales = K_BLOCKS[kind]
    rows, columns = shape
    raw = generator.integers(0, 256, (rows, columns // 256, block_bytes), dtype=np.uint8)
    for place in scales:
        scale = np.float16(generator.uniform(2e-5, 6e-5, raw.shape[:2]))
        raw[:, :, place : place + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, pre_tokenizer: str) -> None:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _named_tensors(source: Path, config: ModelConfig, family: str) -> dict[str, np.ndarray]:
    """Returns the tensors under llama.cpp's names and in its order of rows."""
    heads_of = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    names = {checkpoint: outer for outer, checkpoint in OUTER_TENSORS.items()}
    parts = {checkpoint: part for part, checkpoint in LAYER_TENSORS.items()}
    tensors: dict[str, np.ndarray] = {}
    for checkpoint, tensor in load_file(source / "model.safetensors").items():
        values = tensor.numpy()
        if checkpoint in names:
            tensors[names[checkpoint]] = values
            continue
        _, _, index, rest = checkpoint.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        part = parts[stem]
        if family in PERMUTED and part in heads_of:
            values = _permute(values, heads_of[part])
        tensors[f"blk.{index}.{part}.{kind}"] = np.ascontiguousarray(values)
    return tensors


def _permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Orders rotary rows as llama.cpp's converter does."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
