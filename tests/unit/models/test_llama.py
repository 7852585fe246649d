from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.engine.model_runner import ModelRunner
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
from tests.support.kv import whole_blocks
from tests.support.oracle_model import OracleModel
from tests.support.tiny_models import make_tiny_llama, make_tiny_qwen2

SCATTERED = [*range(1, 40, 2), *range(38, -1, -2)]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(3, 384, (num_tokens,), generator=generator).tolist()


def runner_of(folder: Path, **over: object) -> ModelRunner:
    engine = EngineConfig(model=str(folder), **over)  # type: ignore[arg-type]  # test settings
    return make_runner(load_model(folder, engine), engine)


@dataclass(frozen=True)
class Variant:
    make: Callable[..., Path]
    shape: dict[str, object]


VARIANTS = {
    "llama": Variant(make_tiny_llama, {}),
    "llama_tied": Variant(make_tiny_llama, {"is_tied": True}),
    "llama_one_kv_head_odd_sizes": Variant(
        make_tiny_llama, {"heads": 3, "kv_heads": 1, "hidden": 72, "intermediate": 200}
    ),
    "llama_without_groups": Variant(make_tiny_llama, {"kv_heads": 4}),
    "qwen2": Variant(make_tiny_qwen2, {}),
    "qwen2_tied": Variant(make_tiny_qwen2, {"is_tied": True}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    variant = VARIANTS[request.param]
    return variant.make(tmp_path_factory.mktemp(request.param), **variant.shape)


@pytest.fixture(scope="module")
def tiny_runner(tiny_llama_folder: Path) -> ModelRunner:
    return runner_of(tiny_llama_folder)


def test_greedy_tokens_equal_transformers(variant_folder: Path) -> None:
    oracle, runner = OracleModel(variant_folder), runner_of(variant_folder)
    for num_tokens in (1, 15, 16, 17, 31, 32, 33, 64, 65, 150):
        prompt = prompt_of(num_tokens)
        ours = generate(runner, make_request(prompt), 24, range(20))
        assert ours == oracle.generate(prompt, 24), f"prompt of {num_tokens}"


@pytest.mark.parametrize("block_size", [1, 8, 64, 128])
def test_greedy_tokens_are_the_same_at_every_block_size(
    tiny_llama_folder: Path, block_size: int
) -> None:
    prompt = prompt_of(70)
    expected = generate(runner_of(tiny_llama_folder), make_request(prompt), 20, range(8))
    runner = runner_of(tiny_llama_folder, block_size=block_size)
    blocks = list(range(-(-90 // block_size) - 1, -1, -1))
    if block_size == 1:
        runner = make_runner(runner.model, EngineConfig(model="", block_size=1), num_blocks=90)
    assert generate(runner, make_request(prompt), 20, blocks) == expected


@pytest.mark.parametrize("num_prompt", [1, 37, 64, 200])
@pytest.mark.parametrize("chunk_tokens", [7, 16, 37, 64, 100])
def test_logits_and_kv_are_bit_equal_whatever_the_chunk_borders(
    tiny_llama_folder: Path, num_prompt: int, chunk_tokens: int
) -> None:
    request = make_request(prompt_of(num_prompt))
    whole, chunked = runner_of(tiny_llama_folder), runner_of(tiny_llama_folder)
    expected = compute_in_chunks(whole, request, range(13), [num_prompt])
    ends = [*range(chunk_tokens, num_prompt, chunk_tokens), num_prompt]
    assert torch.equal(compute_in_chunks(chunked, request, range(13), ends), expected)
    region = whole_blocks(whole.kv, range(13))
    assert torch.equal(chunked.kv.pack(region), whole.kv.pack(region))


def test_prefill_logits_are_bit_equal_whatever_else_is_in_the_batch(
    tiny_runner: ModelRunner,
) -> None:
    prompts = [prompt_of(length, seed=1) for length in (50, 1, 130, 64, 17)]
    blocks = [range(10 * index, 10 * index + 10) for index in range(5)]
    slices = [
        make_slice(make_request(prompt, request_id=str(index)), prompt, 0, len(prompt), table)
        for index, (prompt, table) in enumerate(zip(prompts, blocks, strict=True))
    ]
    alone = [compute_logits(tiny_runner, part)[0] for part in slices]
    together = compute_logits(tiny_runner, *slices)
    backwards = compute_logits(tiny_runner, *reversed(slices)).flip(0)
    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(backwards, together)


def test_B10_decode_logits_are_bit_equal_at_batch_1_8_and_32(tiny_runner: ModelRunner) -> None:
    parts = []
    for index in range(32):
        prompt = prompt_of(5 + index % 11, seed=index)
        table = [2 * index + 1, 2 * index]
        request = make_request(prompt, request_id=str(index))
        first = compute_in_chunks(tiny_runner, request, table, [len(prompt)])
        tokens = [*prompt, int(first.argmax())]
        parts.append(make_slice(request, tokens, len(prompt), len(prompt) + 1, table))
    alone = torch.cat([compute_logits(tiny_runner, part) for part in parts])
    assert torch.equal(compute_logits(tiny_runner, *parts), alone)
    assert torch.equal(compute_logits(tiny_runner, *parts[8:16]), alone[8:16])


def test_prefill_and_decode_in_one_batch_change_no_bit(tiny_runner: ModelRunner) -> None:
    prompt, other = prompt_of(40), prompt_of(90, seed=2)
    request, neighbour = make_request(prompt), make_request(other, request_id="other")
    first = compute_in_chunks(tiny_runner, request, range(4), [40])
    decode = make_slice(request, [*prompt, int(first.argmax())], 40, 41, range(4))
    prefill = make_slice(neighbour, other, 0, 90, range(4, 10))
    alone = [compute_logits(tiny_runner, part) for part in (decode, prefill)]
    assert torch.equal(compute_logits(tiny_runner, decode, prefill), torch.cat(alone))


@pytest.mark.parametrize("num_cached", [16, 48, 64, 80, 144])
def test_logits_are_bit_equal_on_a_cached_prefix(tiny_runner: ModelRunner, num_cached: int) -> None:
    prompt = prompt_of(150, seed=3)
    expected = compute_in_chunks(tiny_runner, make_request(prompt), range(10), [150])
    num_shared = num_cached // 16
    table = [*range(num_shared), *range(20, 30 - num_shared)]
    on_cache = compute_in_chunks(tiny_runner, make_request(prompt), table, [150], start=num_cached)
    assert torch.equal(on_cache, expected)


@pytest.mark.parametrize("left_behind", [1e30, float("inf"), float("nan")])
def test_A10_what_earlier_owners_left_in_blocks_changes_no_bit(
    tiny_llama_folder: Path, left_behind: float
) -> None:
    clean, stale = runner_of(tiny_llama_folder), runner_of(tiny_llama_folder)
    for layer in range(2):
        for part in stale.kv.layer(layer):
            part.fill_(left_behind)
    request = make_request(prompt_of(100))
    expected = compute_in_chunks(clean, request, range(8), [100])
    assert torch.equal(compute_in_chunks(stale, request, SCATTERED, [60, 100]), expected)
    assert torch.equal(compute_in_chunks(stale, request, range(56, 64), [100]), expected)


@pytest.mark.parametrize("num_prompt", [1, 20, 64, 100])
@pytest.mark.parametrize("chunk_tokens", [16, 37, 256])
def test_C14_a_replay_of_emitted_tokens_is_bit_equal_to_the_decode_that_made_them(
    tiny_runner: ModelRunner, num_prompt: int, chunk_tokens: int
) -> None:
    request = make_request(prompt_of(num_prompt, seed=4))
    tokens = list(request.token_ids)
    decoded = [compute_in_chunks(tiny_runner, request, range(10), [num_prompt])]
    for _ in range(40):
        tokens.append(int(decoded[-1].argmax()))
        part = make_slice(request, tokens, len(tokens) - 1, len(tokens), range(10))
        decoded.append(compute_logits(tiny_runner, part)[0])
    for num_emitted in (1, 7, 40):
        known = num_prompt + num_emitted
        again = make_request(tokens[:known], num_emitted=num_emitted)
        ends = [*range(chunk_tokens, known, chunk_tokens), known]
        replayed = compute_in_chunks(tiny_runner, again, SCATTERED, ends)
        assert torch.equal(replayed, decoded[num_emitted])


def test_logits_do_not_depend_on_the_length_limit(tiny_llama_folder: Path) -> None:
    request = make_request(prompt_of(100))
    long = runner_of(tiny_llama_folder)
    short = runner_of(tiny_llama_folder, max_model_len=101)
    expected = compute_in_chunks(long, request, range(8), [100])
    assert torch.equal(compute_in_chunks(short, request, range(8), [100]), expected)


def test_requests_in_one_batch_get_the_tokens_they_get_alone(tiny_runner: ModelRunner) -> None:
    prompts = [prompt_of(length, seed=5) for length in (3, 16, 40)]
    members = [
        (make_request(prompt), range(8 * index, 8 * index + 8))
        for index, prompt in enumerate(prompts)
    ]
    together = generate_together(tiny_runner, members, 20)
    alone = [generate(tiny_runner, request, 20, table) for request, table in members]
    assert together == alone


def test_a_step_that_samples_nothing_returns_no_logits(tiny_runner: ModelRunner) -> None:
    prompt = prompt_of(40)
    part = make_slice(make_request(prompt), prompt, 0, 16, range(3))
    assert compute_logits(tiny_runner, part).shape == (0, 384)


def test_bfloat16_runs_and_comes_near_float32(tiny_llama_folder: Path) -> None:
    prompt = prompt_of(80)
    runner = runner_of(tiny_llama_folder, dtype="bfloat16")
    logits = compute_in_chunks(runner, make_request(prompt), range(5), [37, 80])
    expected = OracleModel(tiny_llama_folder).last_logits(prompt)
    in_bfloat16 = OracleModel(tiny_llama_folder, torch.bfloat16).last_logits(prompt)
    allowed = 2 * (in_bfloat16 - expected).abs().max() + 0.05
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < allowed
