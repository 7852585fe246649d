"""Dynamic NTK scaling: a key's rotation depends on the length of the sequence that computed it."""

from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import effective_engine, read_model_config
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

ORIGINAL = 64
BLOCKS = range(16)
SCATTERED = range(31, 15, -1)


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, 384, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    target = tmp_path_factory.mktemp("dynamic")
    return make_tiny(target, "llama", max_position=ORIGINAL, rope_scaling=scaling)


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    engine = EngineConfig(model=str(folder))
    return make_runner(load_model(folder, engine), engine, num_blocks=32)


@pytest.mark.parametrize("num_prompt", [5, 50, 63, 64, 65, 90, 200])
def test_greedy_tokens_equal_transformers(
    folder: Path, runner: ModelRunner, num_prompt: int
) -> None:
    prompt = prompt_of(num_prompt)
    ours = generate(runner, make_request(prompt), 24, BLOCKS, chunk_tokens=37)
    # A new one each time: it keeps the base of the longest sequence that it has seen.
    assert ours == OracleModel(folder).generate(prompt, 24)


@pytest.mark.parametrize("num_prompt", [40, 64, 100])
def test_C14_chunks_neighbours_and_replays_change_no_bit(
    runner: ModelRunner, num_prompt: int
) -> None:
    request = make_request(prompt_of(num_prompt))
    tokens = list(request.token_ids)
    decoded = [compute_in_chunks(runner, request, BLOCKS, [num_prompt])]
    ends = [16, 37, num_prompt]
    assert torch.equal(compute_in_chunks(runner, request, SCATTERED, ends), decoded[0])
    other = prompt_of(91)
    neighbour = make_slice(make_request(other, request_id="other"), other, 0, 91, range(16, 22))
    for step in range(40):
        tokens.append(int(decoded[-1].argmax()))
        part = make_slice(request, tokens, len(tokens) - 1, len(tokens), BLOCKS)
        neighbours = (neighbour,) if step % 3 == 1 else ()
        decoded.append(compute_logits(runner, part, *neighbours)[0])
    again = make_request(tokens, num_emitted=40)
    replayed = compute_in_chunks(runner, again, SCATTERED, [30, len(tokens) - 9, len(tokens)])
    assert torch.equal(replayed, decoded[-1])


def test_kv_of_a_common_prefix_differs_with_the_length_of_the_prompt(runner: ModelRunner) -> None:
    prompt = prompt_of(120)
    packed = []
    for num_tokens in (70, 120):
        request = make_request(prompt[:num_tokens])
        compute_in_chunks(runner, request, BLOCKS, [num_tokens])
        keys, values = runner.kv.layer(1)
        packed.append(torch.cat((keys[:64], values[:64])).clone())
    assert not torch.equal(packed[0], packed[1])


def test_prefixes_are_shared_only_where_no_sequence_is_stretched(folder: Path) -> None:
    config = read_model_config(folder)
    assert config.max_position == 4 * ORIGINAL
    assert not effective_engine(config, EngineConfig(model="m")).enable_prefix_caching
    short = EngineConfig(model="m", max_model_len=ORIGINAL)
    assert effective_engine(config, short) == short
    longer = EngineConfig(model="m", max_model_len=ORIGINAL + 1)
    assert not effective_engine(config, longer).enable_prefix_caching


def test_models_that_are_not_stretched_share_prefixes(tiny_llama_folder: Path) -> None:
    engine = EngineConfig(model="m")
    assert effective_engine(read_model_config(tiny_llama_folder), engine) == engine
