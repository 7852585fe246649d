import json
from pathlib import Path

import pytest

from pdserve.config.engine import EngineConfig
from pdserve.errors import ConfigError
from pdserve.models.folder import (
    effective_max_model_len,
    geometry_of,
    read_model_config,
    require_tokenizer,
)
from tests.support.tiny_models import make_tiny_llama, make_tiny_qwen2

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
}


def folder_with(path: Path, **over: object) -> Path:
    fields = {name: value for name, value in (CONFIG | over).items() if value is not None}
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_a_config_is_read_with_its_defaults(tmp_path: Path) -> None:
    config = read_model_config(folder_with(tmp_path))
    assert config.architecture == "llama"
    assert (config.head_dim, config.num_kv_heads) == (16, 2)
    assert (config.rope_theta, config.rms_norm_eps) == (5000.0, 1e-6)
    assert not config.has_tied_embeddings
    assert not config.has_qkv_bias
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None


def test_absent_kv_heads_means_one_per_query_head(tmp_path: Path) -> None:
    assert read_model_config(folder_with(tmp_path, num_key_value_heads=None)).num_kv_heads == 4


def test_qwen2_has_biases_and_mistral_may_have_no_window(tmp_path: Path) -> None:
    qwen = read_model_config(folder_with(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (qwen.architecture, qwen.has_qkv_bias) == ("qwen2", True)
    mistral = folder_with(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None)
    assert read_model_config(mistral).architecture == "mistral"


@pytest.mark.parametrize(
    ("over", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0),
        ({"rope_scaling": None, "rope_theta": 9}, 9.0),
        ({"rope_theta": None}, 10000.0),
    ],
)
def test_the_rope_base_is_read_from_either_place(
    tmp_path: Path, over: dict[str, object], theta: float
) -> None:
    assert read_model_config(folder_with(tmp_path, **over)).rope_theta == theta


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; known: Ll"),
        ({"architectures": None}, "architectures must be a list"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be an integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads 3, got 4"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"sliding_window": 128}, "sliding_window is not supported for Llama, got 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"eos_token_id": "x"}, "eos_token_id must be token ids"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, over: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_model_config(folder_with(tmp_path, **over))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "must be at least 1, got 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "x"}}, "factor must be a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor must exceed low_freq_factor",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "per kind of layer is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor must be 1\.0",
        ),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "at least 4"),
    ],
)
def test_a_rope_scaling_that_cannot_be_followed_is_named(
    tmp_path: Path, over: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(folder_with(tmp_path, **over))


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 1.5}, 768),
        ({"rope_type": "yarn", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_the_longest_context_is_that_after_scaling(
    tmp_path: Path, scaling: dict[str, object], length: int
) -> None:
    assert read_model_config(folder_with(tmp_path, rope_scaling=scaling)).max_position == length


def test_the_defaults_of_each_family_are_those_of_transformers(tmp_path: Path) -> None:
    bare = {"num_hidden_layers": 5, "rope_theta": None, "head_dim": None}
    smol = read_model_config(folder_with(tmp_path, architectures=["SmolLM3ForCausalLM"], **bare))
    assert (smol.rope_theta, smol.has_tied_embeddings) == (2_000_000.0, True)
    assert (smol.unrotated_layers, smol.windowed_layers) == ({3}, set())
    qwen = read_model_config(folder_with(tmp_path, architectures=["Qwen3ForCausalLM"], **bare))
    assert (qwen.rope_theta, qwen.head_dim, qwen.has_qk_norm) == (10000.0, 128, True)
    assert not qwen.has_qkv_bias
    mistral = read_model_config(
        folder_with(tmp_path, architectures=["MistralForCausalLM"], max_position_embeddings=9000)
    )
    assert [mistral.window_of(layer) for layer in range(2)] == [4096, 4096]


@pytest.mark.parametrize(
    ("architecture", "over", "message"),
    [
        ("Mistral", {"attention_bias": True}, "attention_bias is not supported"),
        ("Qwen2", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("Mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        (
            "Qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"]},
            "for each of 2 layers",
        ),
        (
            "Qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be",
        ),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers must be 0 or 1 for each of 2 layers"),
        ("SmolLM3", {"no_rope_layers": [1, [0]]}, "no_rope_layers must be 0 or 1"),
    ],
)
def test_what_a_family_does_not_know_is_named(
    tmp_path: Path, architecture: str, over: dict[str, object], message: str
) -> None:
    folder = folder_with(tmp_path, architectures=[f"{architecture}ForCausalLM"], **over)
    with pytest.raises(ConfigError, match=message):
        read_model_config(folder)


def test_E9_a_model_that_brings_its_own_code_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ConfigError, match="auto_map"):
        read_model_config(folder)


def test_a_qwen2_window_that_is_switched_off_is_no_obstacle(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        sliding_window=128,
        use_sliding_window=False,
    )
    assert read_model_config(folder).architecture == "qwen2"


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_an_absent_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_config(tmp_path)


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, eos_token_id=5)
    assert read_model_config(folder).eos_token_ids == (5,)
    generation = folder / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 8]}', encoding="utf-8")
    assert read_model_config(folder).eos_token_ids == (7, 8)
    generation.write_text("{}", encoding="utf-8")
    assert read_model_config(folder).eos_token_ids == (5,)


def test_the_revision_tells_weights_and_settings_apart(tmp_path: Path) -> None:
    first = make_tiny_llama(tmp_path / "first", seed=1)
    same = make_tiny_llama(tmp_path / "same", seed=1)
    other_weights = make_tiny_llama(tmp_path / "weights", seed=2)
    other_config = make_tiny_llama(tmp_path / "config", seed=1, rope_theta=500.0)
    revisions = [
        read_model_config(folder).revision for folder in (first, same, other_weights, other_config)
    ]
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 3


def test_A17_the_geometry_carries_what_two_workers_must_share(tmp_path: Path) -> None:
    config = read_model_config(make_tiny_qwen2(tmp_path))
    engine = EngineConfig(model="m", block_size=32, dtype="bfloat16")
    geometry = geometry_of(config, engine)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (2, 2, 16)
    assert (geometry.block_size, geometry.dtype) == (32, "bfloat16")
    assert geometry.model_revision == config.revision


def test_dummy_weights_of_different_seeds_never_share_kv(tmp_path: Path) -> None:
    config = read_model_config(folder_with(tmp_path))
    digests = {
        geometry_of(config, EngineConfig(model="m")).digest(),
        geometry_of(config, EngineConfig(model="m", load_format="dummy")).digest(),
        geometry_of(config, EngineConfig(model="m", load_format="dummy", seed=1)).digest(),
    }
    assert len(digests) == 3


def test_the_effective_length_is_the_models_or_less(tmp_path: Path) -> None:
    config = read_model_config(folder_with(tmp_path))
    assert effective_max_model_len(config, None) == 512
    assert effective_max_model_len(config, 512) == 512
    assert effective_max_model_len(config, 100) == 100
    with pytest.raises(ConfigError, match="at most the model's 512, got 513"):
        effective_max_model_len(config, 513)


def test_a_folder_without_tokenizer_is_refused_only_where_one_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        require_tokenizer(tmp_path)
    folder = make_tiny_llama(tmp_path)
    assert require_tokenizer(folder) == folder / "tokenizer.json"
