from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pdserve.errors import ConfigError
from pdserve.models.convert_gguf import convert_gguf
from pdserve.models.folder import read_model_config
from tests.support.gguf_files import write_gguf

TEXTS = ("It's 2024, isn't it?", "caf\u00e9 \u4e16\u754c \U0001f30d", "a  b\n\nc <|im_end|> d")


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
    with pytest.raises(ConfigError, match=r"broken\.gguf is no readable GGUF file"):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]


def test_a_cut_off_file_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_folder, "gpt-2")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match="is no readable GGUF"):
        convert_gguf(path, tmp_path / "out")


def add_longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def add_expert(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((4, 64), dtype=np.float32))


def add_rope_freqs(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))


def add_partial_rotary(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_dimension_count(8)


@pytest.mark.parametrize(
    ("pre_tokenizer", "over", "message"),
    [
        ("gpt-2", {"architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ("gpt-2", {"extend": add_longrope}, "rope scaling 'longrope' is not supported"),
        ("gpt-2", {"extend": add_expert}, r"tensor blk\.0\.ffn_gate_inp\.weight is not supported"),
        ("gpt-2", {"extend": add_rope_freqs}, r"rope_freqs\.weight is not that of Llama 3"),
        ("gpt-2", {"extend": add_partial_rotary}, "rope.dimension_count must be the head's 16"),
        ("tekken", {}, "pre-tokenizer 'tekken' is not supported"),
    ],
)
def test_what_is_not_supported_is_named_and_leaves_nothing_behind(
    tiny_llama_folder: Path,
    tmp_path: Path,
    pre_tokenizer: str,
    over: dict[str, Any],
    message: str,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_folder, pre_tokenizer, **over)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
