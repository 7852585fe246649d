"""Each architecture and kind of rope scaling against transformers, token for token."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.registry import load_model
from tests.support.generation import (
    compute_in_chunks,
    compute_logits,
    generate,
    make_request,
    make_runner,
    make_slice,
)
from tests.support.oracle_model import OracleModel
from tests.support.tiny_models import make_tiny

BLOCKS = range(24)
SCATTERED = [*range(1, 24, 2), *range(22, -1, -2)]
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Variant:
    family: str
    over: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "llama_biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": Variant("llama", {"head_dim": 32, "is_tied": True}),
    "mistral": Variant("mistral", {"sliding_window": None}),
    "mistral_window_2": Variant("mistral", {"sliding_window": 2}),
    "mistral_window_50": Variant("mistral", {"sliding_window": 50}),
    "mistral_window_64": Variant("mistral", {"sliding_window": 64}),
    "mistral_window_100": Variant("mistral", {"sliding_window": 100, "is_tied": True}),
    "qwen2_window": Variant(
        "qwen2", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen2_window_off": Variant("qwen2", {"sliding_window": 40, "use_sliding_window": False}),
    "qwen3": Variant("qwen3", {"head_dim": 32}),
    "qwen3_tied": Variant("qwen3", {"is_tied": True, "heads": 3, "kv_heads": 1, "head_dim": 24}),
    "qwen3_bias_and_window": Variant(
        "qwen3",
        {
            "attention_bias": True,
            "sliding_window": 40,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3": Variant("smollm3", {"num_layers": 4, "is_tied": True}),
    "smollm3_listed": Variant(
        "smollm3",
        {
            "num_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "sliding_window": 40,
            "use_sliding_window": True,
        },
    ),
    "linear": Variant("llama", {"max_position": 64, "rope_scaling": LINEAR}),
    "llama3": Variant("llama", {"max_position": 512, "rope_scaling": LLAMA3}),
    "llama3_new_layout": Variant(
        "llama",
        {
            "max_position": 512,
            "rope_theta": 1.0,
            "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
        },
    ),
    "yarn": Variant("qwen2", {"max_position": 64, "rope_scaling": YARN}),
    "yarn_old_layout": Variant(
        "qwen2",
        {
            "max_position": 64,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        },
    ),
    "yarn_all_fields": Variant(
        "smollm3",
        {
            "max_position": 256,
            "head_dim": 32,
            "rope_scaling": YARN
            | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 8.0},
        },
    ),
    "yarn_attention_factor": Variant(
        "llama", {"max_position": 256, "rope_scaling": YARN | {"attention_factor": 1.3}}
    ),
}


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, 384, (num_tokens,), generator=generator).tolist()


def runner_of(folder: Path) -> ModelRunner:
    engine = EngineConfig(model=str(folder))
    return make_runner(load_model(folder, engine), engine, num_blocks=48)


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS[request.param]
    return make_tiny(tmp_path_factory.mktemp(request.param), variant.family, **variant.over)


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return runner_of(folder)


def test_greedy_tokens_equal_transformers(folder: Path, runner: ModelRunner) -> None:
    oracle = OracleModel(folder)
    for num_tokens in (5, 60, 130):
        prompt = prompt_of(num_tokens)
        ours = generate(runner, make_request(prompt), 20, BLOCKS)
        assert ours == oracle.generate(prompt, 20), f"prompt of {num_tokens}"


def test_logits_come_near_those_of_transformers(folder: Path, runner: ModelRunner) -> None:
    prompt = prompt_of(200)
    ours = compute_in_chunks(runner, make_request(prompt), BLOCKS, [200])
    expected = OracleModel(folder).last_logits(prompt)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


def test_C14_chunks_neighbours_and_replays_change_no_bit(runner: ModelRunner) -> None:
    num_prompt, num_emitted = 150, 12
    request = make_request(prompt_of(num_prompt))
    tokens = list(request.token_ids)
    decoded = [compute_in_chunks(runner, request, BLOCKS, [num_prompt])]
    ends = [16, 37, 101, num_prompt]
    assert torch.equal(compute_in_chunks(runner, request, range(24, 48), ends), decoded[0])
    other = prompt_of(90)
    neighbour = make_slice(make_request(other, request_id="other"), other, 0, 90, range(24, 30))
    for step in range(num_emitted):
        tokens.append(int(decoded[-1].argmax()))
        part = make_slice(request, tokens, len(tokens) - 1, len(tokens), BLOCKS)
        neighbours = (neighbour,) if step % 3 == 1 else ()
        decoded.append(compute_logits(runner, part, *neighbours)[0])
    again = make_request(tokens, num_emitted=num_emitted)
    replayed = compute_in_chunks(runner, again, SCATTERED, [70, 155, len(tokens)])
    assert torch.equal(replayed, decoded[-1])


def test_a_window_hides_what_lies_before_it(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "mistral", sliding_window=30, num_layers=1)
    windowed = runner_of(folder)
    prompt = prompt_of(100)
    changed = [*prompt_of(70), *prompt[70:]]
    logits = [
        compute_in_chunks(windowed, make_request(tokens), BLOCKS, [100])
        for tokens in (prompt, changed)
    ]
    assert torch.equal(logits[0], logits[1])
    moved = [*prompt[:70], prompt[70] ^ 1, *prompt[71:]]
    seen = compute_in_chunks(windowed, make_request(moved), BLOCKS, [100])
    assert not torch.equal(seen, logits[0])


def test_bfloat16_comes_as_near_to_float32_as_transformers(
    folder: Path, runner: ModelRunner
) -> None:
    engine = EngineConfig(model=str(folder), dtype="bfloat16")
    halved = make_runner(load_model(folder, engine), engine, num_blocks=16)
    prompt = prompt_of(120)
    exact = compute_in_chunks(runner, make_request(prompt), BLOCKS, [120])
    ours = compute_in_chunks(halved, make_request(prompt), range(16), [50, 120])
    theirs = OracleModel(folder, torch.bfloat16).last_logits(prompt)
    assert (ours - exact).abs().mean() < 2 * (theirs - exact).abs().mean() + 0.02
