import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pdserve.errors import ConfigError
from pdserve.models.convert_gguf import LAYER_TENSORS, OUTER_TENSORS, convert_gguf
from pdserve.models.folder import read_model_config
from tests.support.tiny_models import CHAT_TEMPLATE

TEXTS = ("It's 2024, isn't it?", "caf\u00e9 \u4e16\u754c \U0001f30d", "a  b\n\nc <|im_end|> d")


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Orders rotary rows as llama.cpp's converter does."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, source: Path, pre_tokenizer: str, **over: object) -> Path:
    """Writes a model folder as GGUF."""
    config = read_model_config(source)
    name = config.architecture
    writer = gguf.GGUFWriter(path, str(over.get("architecture", name)))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if "scaling" in over:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges(merges_of(tokenizer))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads_of = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    names = {checkpoint: outer for outer, checkpoint in OUTER_TENSORS.items()}
    parts = {checkpoint: part for part, checkpoint in LAYER_TENSORS.items()}
    for checkpoint, tensor in load_file(source / "model.safetensors").items():
        values = tensor.numpy()
        if checkpoint in names:
            writer.add_tensor(names[checkpoint], values)
            continue
        _, _, index, rest = checkpoint.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        part = parts[stem]
        if name == "llama" and part in heads_of:
            values = permute(values, heads_of[part])
        writer.add_tensor(f"blk.{index}.{part}.{kind}", np.ascontiguousarray(values))
    if "extra_tensor" in over:
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merges_of(tokenizer: Tokenizer) -> list[str]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [" ".join(pair) for pair in merges]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_survives_the_way_through_gguf(
    family: str, tiny_llama_folder: Path, tiny_qwen2_folder: Path, tmp_path: Path
) -> None:
    source = tiny_llama_folder if family == "llama" else tiny_qwen2_folder
    target = tmp_path / "models" / "converted"
    convert_gguf(write_gguf(tmp_path / "m.gguf", source, "gpt-2"), target)
    expected, found = (
        load_file(source / "model.safetensors"),
        load_file(target / "model.safetensors"),
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert read_model_config(target) == read_model_config(source)
    original = Tokenizer.from_file(str(source / "tokenizer.json"))
    rebuilt = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert [rebuilt.encode(text).ids for text in TEXTS] == [
        original.encode(text).ids for text in TEXTS
    ]
    assert sorted(path.name for path in target.parent.iterdir()) == ["converted"]


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "done"
    target.mkdir()
    convert_gguf(tmp_path / "absent.gguf", target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.gguf: is no readable GGUF"):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]


def test_a_cut_off_file_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_folder, "gpt-2")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match="is no readable GGUF"):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("pre_tokenizer", "over", "message"),
    [
        ("gpt-2", {"architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ("gpt-2", {"scaling": True}, "rope scaling 'yarn' is not supported"),
        ("gpt-2", {"extra_tensor": True}, "tensor rope_freqs.weight is not supported"),
        ("tekken", {}, "pre-tokenizer 'tekken' is not supported"),
    ],
)
def test_what_is_not_supported_is_named_and_leaves_nothing_behind(
    tiny_llama_folder: Path,
    tmp_path: Path,
    pre_tokenizer: str,
    over: dict[str, object],
    message: str,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_folder, pre_tokenizer, **over)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
