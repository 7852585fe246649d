"""SmolLM2-135M, converted from GGUF, against transformers in float32 (both on the same weights)."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pdserve.config.engine import EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import read_model_config
from pdserve.models.registry import load_model
from tests.support.generation import (
    compute_in_chunks,
    compute_logits,
    generate,
    generate_together,
    make_request,
    make_runner,
    make_slice,
)
from tests.support.oracle_model import OracleModel

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
)
TEXT = (
    "A river runs through the old town, and every evening the people cross the bridge to hear "
    "the musicians play. In the year 1784 a storm took the bridge away; nobody knows where to. "
)


@dataclass(frozen=True)
class SmolLm2:
    runner: ModelRunner
    oracle: OracleModel
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> SmolLm2:
    engine = EngineConfig(model="smollm2-135m")
    return SmolLm2(
        runner=make_runner(load_model(smollm2_folder, engine), engine, num_blocks=96),
        oracle=OracleModel(smollm2_folder),
        tokenizer=Tokenizer.from_file(str(smollm2_folder / "tokenizer.json")),
    )


def test_the_converted_folder_describes_the_model(smollm2_folder: Path) -> None:
    config = read_model_config(smollm2_folder)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position) == (49152, 8192)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.eos_token_ids == (2,)
    assert config.has_tied_embeddings


def test_the_converted_tokenizer_splits_digits_and_knows_control_tokens(smollm2: SmolLm2) -> None:
    text = "It's 2024 - \u4e16\u754c \U0001f30d <|im_end|>\n"
    tokens = smollm2.tokenizer.encode(text).tokens
    assert tokens[:6] == ["It", "'s", "Ġ", "2", "0", "2"]
    assert "<|im_end|>" in tokens
    assert smollm2.tokenizer.decode(smollm2.encode(text), skip_special_tokens=False) == text


# The other prompts and lengths are compared through a whole cluster, in test_tok.
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("The capital of France is", id="raw"),
        pytest.param(CHAT, id="chat", marks=pytest.mark.soak),
        pytest.param("日本の首都は\U0001f5fc", id="unicode", marks=pytest.mark.soak),
        pytest.param("Hi", id="one_token", marks=pytest.mark.soak),
    ],
)
def test_greedy_tokens_equal_transformers(smollm2: SmolLm2, text: str) -> None:
    prompt = smollm2.encode(text)
    ours = generate(smollm2.runner, make_request(prompt), 32, range(16))
    assert ours == smollm2.oracle.generate(prompt, 32)


@pytest.mark.parametrize(
    "num_tokens", [17, *(pytest.param(n, marks=pytest.mark.soak) for n in (15, 16, 31, 32, 33))]
)
def test_greedy_tokens_equal_transformers_around_block_borders(
    smollm2: SmolLm2, num_tokens: int
) -> None:
    prompt = smollm2.encode(TEXT)[:num_tokens]
    ours = generate(smollm2.runner, make_request(prompt), 12, [5, 4, 3, 2, 1, 0], chunk_tokens=16)
    assert ours == smollm2.oracle.generate(prompt, 12)


@pytest.mark.soak
def test_greedy_tokens_equal_transformers_on_a_long_prompt(smollm2: SmolLm2) -> None:
    prompt = smollm2.encode(TEXT * 30)[:1030]
    assert len(prompt) == 1030
    ours = generate(smollm2.runner, make_request(prompt), 8, range(66))
    assert ours == smollm2.oracle.generate(prompt, 8)


def test_a_chat_answers_and_ends(smollm2: SmolLm2) -> None:
    output = generate(smollm2.runner, make_request(smollm2.encode(CHAT)), 16, range(8))
    text = smollm2.tokenizer.decode(output, skip_special_tokens=False)
    assert "4.<|im_end|>" in text


def test_C14_batches_chunks_and_replays_change_no_bit(smollm2: SmolLm2) -> None:
    runner = smollm2.runner
    prompt = smollm2.encode(TEXT * 2)[:45]
    request = make_request(prompt)
    expected = compute_in_chunks(runner, request, range(8), [45])
    assert torch.equal(compute_in_chunks(runner, request, range(8, 16), [16, 37, 45]), expected)

    tokens = list(prompt)
    decoded = [expected]
    other = make_request(smollm2.encode(CHAT), request_id="other")
    others = make_slice(other, other.token_ids, 0, len(other.token_ids), range(16, 24))
    for step in range(24):
        tokens.append(int(decoded[-1].argmax()))
        part = make_slice(request, tokens, len(tokens) - 1, len(tokens), range(8))
        neighbours = (others,) if step % 8 == 3 else ()
        decoded.append(compute_logits(runner, part, *neighbours)[0])
    again = make_request(tokens, num_emitted=24)
    replayed = compute_in_chunks(runner, again, range(30, 38), [37, 50, len(tokens)])
    assert torch.equal(replayed, decoded[-1])


def test_B10_tokens_are_the_same_at_batch_1_and_8(smollm2: SmolLm2) -> None:
    words = smollm2.encode(TEXT * 2)
    members = [
        (make_request(words[index : 2 * index + 4]), range(3 * index, 3 * index + 3))
        for index in range(8)
    ]
    together = generate_together(smollm2.runner, members, 6)
    assert together == [generate(smollm2.runner, request, 6, table) for request, table in members]


def test_bfloat16_comes_near_float32(smollm2: SmolLm2, smollm2_folder: Path) -> None:
    engine = EngineConfig(model="smollm2-135m", dtype="bfloat16", max_model_len=256)
    runner = make_runner(load_model(smollm2_folder, engine), engine, num_blocks=8)
    request = make_request(smollm2.encode("The capital of France is"))
    logits = compute_in_chunks(runner, request, range(8), [len(request.token_ids)])
    expected = smollm2.oracle.last_logits(request.token_ids)
    assert int(logits.argmax()) == int(expected.argmax())
    assert (logits.softmax(0) - expected.softmax(0)).abs().max() < 0.1
