from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of
from pdserve.models.registry import load_model
from pdserve.request import BlockId, Request, RequestId, SamplingParams
from tests.support.generation import (
    compute_logits,
    generate,
    make_request,
    make_runner,
    make_slice,
    run_slices,
)
from tests.support.kv import whole_blocks

PROMPT = list(range(20, 60))
ENGINE = EngineConfig(model="")


@pytest.fixture
def runner(tiny_llama_folder: Path) -> ModelRunner:
    return make_runner(load_model(tiny_llama_folder, ENGINE), ENGINE, num_blocks=16)


def test_only_slices_that_reach_the_end_sample(runner: ModelRunner) -> None:
    whole = make_request(PROMPT, request_id="whole")
    chunk = make_request(PROMPT, request_id="chunk")
    sampled = run_slices(
        runner,
        make_slice(chunk, PROMPT, 0, 16, range(3)),
        make_slice(whole, PROMPT, 0, 40, range(3, 6)),
    )
    assert sampled.keys() == {RequestId("whole")}


def test_tokens_are_drawn_with_the_request_s_own_parameters(runner: ModelRunner) -> None:
    warm = SamplingParams(temperature=1.5, seed=11, logprobs=2)
    request = make_request(PROMPT, sampling=warm)
    output = generate(runner, request, 20, range(4))
    assert generate(runner, request, 20, range(5, 9)) == output
    other = make_request(PROMPT, sampling=replace(warm, seed=12))
    assert generate(runner, other, 20, range(4)) != output
    part = make_slice(request, PROMPT, 0, 40, range(4))
    logprobs = run_slices(runner, part)[request.request_id].logprobs
    assert logprobs is not None
    assert len(logprobs.top) == 2


def test_C14_a_resumed_request_draws_the_tokens_it_would_have_had(runner: ModelRunner) -> None:
    warm = SamplingParams(temperature=1.0, seed=5)
    output = generate(runner, make_request(PROMPT, sampling=warm), 24, range(4))
    for num_emitted in (1, 8, 23):
        known = [*PROMPT, *output[:num_emitted]]
        resumed = make_request(known, num_emitted=num_emitted, sampling=warm)
        rest = generate(runner, resumed, 24 - num_emitted, [9, 7, 5, 3], chunk_tokens=16)
        assert rest == output[num_emitted:]


def test_stop_ids_wait_for_min_tokens(runner: ModelRunner) -> None:
    free = generate(runner, make_request(PROMPT), 1, range(3))[0]
    sampling = SamplingParams(temperature=0.0, min_tokens=1)
    request = make_request(PROMPT, sampling=sampling, eos_token_ids=(free,))
    assert generate(runner, request, 1, range(3))[0] != free


def test_copies_are_done_before_the_step_computes(runner: ModelRunner) -> None:
    request = make_request(PROMPT)
    first = run_slices(runner, make_slice(request, PROMPT, 0, 40, [0, 1, 2]))
    tokens = [*PROMPT, first[request.request_id].token_id]
    expected = run_slices(runner, make_slice(request, tokens, 40, 41, [0, 1, 2]))
    forked = make_slice(request, tokens, 40, 41, [0, 1, 8])
    plan = StepPlan(slices=(forked,), copies=((BlockId(2), BlockId(8)),))
    assert runner.run(plan).sampled == expected


def test_kv_of_another_model_is_refused(runner: ModelRunner) -> None:
    geometry = replace(geometry_of(runner.model.config, ENGINE), num_layers=3)
    with pytest.raises(ValueError, match="does not fit"):
        ModelRunner(runner.model, KvTensors(geometry, 2))


def refused(runner: ModelRunner, request: Request, blocks: list[int], message: str) -> None:
    tokens = request.token_ids
    before = runner.kv.pack(whole_blocks(runner.kv, range(16)))
    with pytest.raises(ValueError, match=message):
        run_slices(runner, make_slice(request, tokens, 0, len(tokens), blocks))
    after = runner.kv.pack(whole_blocks(runner.kv, range(16)))
    assert torch.equal(before, after)


def test_A8_a_block_out_of_range_is_refused_before_anything_is_written(
    runner: ModelRunner,
) -> None:
    refused(runner, make_request(PROMPT), [0, 1, 16], r"block id must be in \[0, 16\), got 16")
    refused(runner, make_request(PROMPT), [0, 1, -1], "got -1")


@pytest.mark.parametrize("token_id", [384, -1, 2**40])
def test_a_token_id_out_of_range_is_refused(runner: ModelRunner, token_id: int) -> None:
    refused(runner, make_request([1, token_id]), [0], f"got {token_id}")


def test_a_sequence_over_the_length_limit_is_refused(tiny_llama_folder: Path) -> None:
    engine = EngineConfig(model="", max_model_len=39)
    short = make_runner(load_model(tiny_llama_folder, engine), engine, num_blocks=16)
    refused(short, make_request(PROMPT), [0, 1, 2], "reaches 40 tokens, over the limit of 39")


def test_a_sequence_may_reach_the_length_limit_in_the_last_blocks(tiny_llama_folder: Path) -> None:
    engine = EngineConfig(model="", max_model_len=40)
    short = make_runner(load_model(tiny_llama_folder, engine), engine, num_blocks=16)
    part = make_slice(make_request(PROMPT), PROMPT, 0, 40, [13, 14, 15])
    far = compute_logits(short, part)
    assert torch.equal(far, compute_logits(short, replace(part, block_ids=(2, 1, 0))))


@pytest.mark.parametrize("num_blocks", [1, 2, 64])
def test_warming_up_changes_no_token_whatever_the_memory(
    tiny_llama_folder: Path, num_blocks: int
) -> None:
    model = load_model(tiny_llama_folder, ENGINE)
    cold, warm = (make_runner(model, ENGINE, num_blocks) for _ in range(2))
    warm.warm_up()
    request = make_request((5, 6, 7))
    assert generate(warm, request, 8, [0]) == generate(cold, request, 8, [0])
