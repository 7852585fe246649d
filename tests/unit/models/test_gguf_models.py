"""Families, types of tensor and rope scalings of GGUF files, against gguf and transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pdserve.config.engine import EngineConfig
from pdserve.config.rope import LinearScaling, Llama3Scaling, YarnScaling
from pdserve.errors import ConfigError
from pdserve.models.convert_gguf import convert_gguf
from pdserve.models.folder import read_model_config
from pdserve.models.registry import load_model
from tests.support.generation import compute_in_chunks, generate, make_request, make_runner
from tests.support.gguf_files import write_gguf
from tests.support.oracle_model import OracleModel
from tests.support.tiny_models import make_tiny

PROMPT = list(range(20, 90))
WIDE = {"hidden": 256, "intermediate": 256, "num_layers": 1, "vocab": 320}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 40},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "is_tied": True},
    "smollm3": {"num_layers": 4, "is_tied": True},
}
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_survives_the_way_through_gguf(family: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", family, **FAMILIES[family])
    target = tmp_path / "converted"
    convert_gguf(write_gguf(tmp_path / "m.gguf", source), target)
    expected = load_file(source / "model.safetensors")
    found = load_file(target / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # The revision is of the text of config.json, which may name more fields.
    read, written = (replace(read_model_config(f), revision="") for f in (target, source))
    assert read == written


@pytest.mark.parametrize("name", KINDS)
def test_every_type_of_tensor_reads_as_gguf_reads_it(name: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", "qwen2", **WIDE)
    kind = GGMLQuantizationType[name]
    path = write_gguf(tmp_path / "m.gguf", source, kind=kind)
    target = tmp_path / "converted"
    convert_gguf(path, target)
    found = load_file(target / "model.safetensors")
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight")
    assert tensor.tensor_type == kind
    expected = gguf.quants.dequantize(tensor.data, kind)
    query = found["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(query.numpy(), expected)
    assert 0.001 < query.std() < 1
    engine = EngineConfig(model=str(target))
    runner = make_runner(load_model(target, engine), engine, num_blocks=8)
    ours = generate(runner, make_request(PROMPT), 8, range(8))
    assert ours == OracleModel(target).generate(PROMPT, 8)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q6_K])
def test_a_file_computes_what_transformers_makes_of_the_same_file(
    family: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    # 128 is the only head of Qwen3 that transformers takes from a GGUF file.
    source = make_tiny(
        tmp_path / "source", family, **WIDE, head_dim=128 if family == "qwen3" else 64
    )
    path = write_gguf(tmp_path / "m.gguf", source, kind=kind)
    convert_gguf(path, tmp_path / "converted")
    engine = EngineConfig(model="")
    runner = make_runner(load_model(tmp_path / "converted", engine), engine, num_blocks=8)
    ours = compute_in_chunks(runner, make_request(PROMPT), range(8), [70])
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)
    assert int(ours.argmax()) == int(expected.argmax())


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def add_old_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def add_none(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(512)


def add_llama3(writer: gguf.GGUFWriter) -> None:
    """Adds the divisors that llama.cpp's converter computes for Llama 3.1."""
    divisors = []
    for frequency in 1.0 / 500000.0 ** (np.arange(0, 32, 2) / 32):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


@pytest.mark.parametrize(
    ("extend", "expected"),
    [
        (add_none, None),
        (add_linear, LinearScaling(factor=4.0)),
        (add_old_linear, LinearScaling(factor=4.0)),
        (
            add_yarn,
            YarnScaling(
                factor=4.0,
                original_max_position=512,
                attention_factor=0.1 * np.log(4.0) + 1,
            ),
        ),
        (
            add_llama3,
            Llama3Scaling(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=8192,
            ),
        ),
    ],
)
def test_a_rope_scaling_is_read_from_metadata_or_divisors(
    extend: Callable[[gguf.GGUFWriter], None], expected: object, tmp_path: Path
) -> None:
    source = make_tiny(tmp_path / "source", "llama", rope_theta=500000.0, head_dim=32)
    path = write_gguf(tmp_path / "m.gguf", source, extend=extend)
    convert_gguf(path, tmp_path / "converted")
    assert read_model_config(tmp_path / "converted").rope_scaling == expected


def test_a_yarn_magnitude_that_config_json_cannot_say_is_refused(tmp_path: Path) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        add_yarn(writer)
        writer.add_rope_scaling_yarn_attn_factor(1.5)

    source = make_tiny(tmp_path / "source", "llama")
    path = write_gguf(tmp_path / "m.gguf", source, extend=extend)
    with pytest.raises(ConfigError, match=r"yarn_attn_factor 1\.5 is not supported"):
        convert_gguf(path, tmp_path / "converted")
