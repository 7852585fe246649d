"""Two pools with a GPU's engines, kernels in Triton's interpreter: hand-off, forks, scores."""

from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.config.worker import HandoffConfig
from pdserve.request import SamplingParams
from tests.support.cuda_engine import make_cuda_runner, step_buffers
from tests.support.cuda_pair import make_cuda_pair, run_colocated
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.poison import PoisonedRunner
from tests.support.random_pair import compare, expect_alone, make_visits, visit
from tests.support.teacher_forcing import divergence, force

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128}


def test_TOK_prefill_to_decode_equals_colocated_in_deterministic_mode(
    tiny_llama_folder: Path,
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    requests = [
        make_request(f"r{length}", tuple(range(9, 9 + length)), sampling=sampling)
        for length in (3, 19)
    ]
    pair = make_cuda_pair(tiny_llama_folder, deterministic=True, **SETTINGS)
    outputs = pair.run(requests)
    pair.assert_ledger()
    assert pair.decode.describe().counters.handoffs_completed == len(requests)
    colocated = make_cuda_pair(tiny_llama_folder, deterministic=True, **SETTINGS)
    assert outputs == run_colocated(colocated, requests)
    assert colocated.links.bytes_sent == 0
    assert all(len(ids) == 2 for ids in outputs.values())


@pytest.mark.parametrize("is_local", [False, True])
def test_samples_that_share_a_partial_block_are_the_cpus(
    tiny_llama_folder: Path, is_local: bool
) -> None:
    sampling = SamplingParams(n=2, temperature=1.0, seed=11, max_tokens=3, ignore_eos=True)
    group = make_request("g", tuple(range(5, 24)), sampling=sampling)
    seen = []
    for pair in (
        EnginePair(tiny_llama_folder, **SETTINGS),
        make_cuda_pair(tiny_llama_folder, **SETTINGS),
    ):
        seen.append(run_colocated(pair, [group]) if is_local else pair.run([group]))
        pair.assert_ledger()
    assert seen[1] == seen[0]
    assert len({tuple(ids) for ids in seen[0].values()}) == 2


@pytest.mark.soak
def test_LEDGER_random_visits_over_poisoned_memory_give_the_tokens_of_a_fresh_engine(
    tiny_llama_folder: Path,
) -> None:
    over = {**SETTINGS, "deterministic": True, "max_num_seqs": 8}
    visits = make_visits(7, 4, 384, max_prompt=20, max_tokens=3, turns=4)
    pair = make_cuda_pair(
        tiny_llama_folder,
        wrap=lambda runner: PoisonedRunner(runner, runner.kv, step_buffers(runner)),
        decode_blocks=6,
        handoff=HandoffConfig(frame_tokens=64, lease_s=0.2),
        **over,
    )
    router = visit(pair, visits)
    fresh = make_cuda_pair(tiny_llama_folder, **over)
    assert compare(router, visits, expect_alone(fresh, visits)) >= 3
    assert pair.decode.describe().counters.handoffs_completed >= 1


def test_forced_text_has_the_scores_that_the_engine_tells_whatever_the_chunks(
    tiny_llama_folder: Path,
) -> None:
    engine = EngineConfig(
        model=str(tiny_llama_folder), max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32
    )
    runner = make_cuda_runner(tiny_llama_folder, engine, 4)
    tokens = tuple(range(40, 70))
    whole = list(force(runner, tokens, chunk_tokens=32))
    parts = list(force(runner, tokens, chunk_tokens=17))
    logprobs = [torch.cat([one.logprobs for one in chunks]) for chunks in (whole, parts)]
    assert logprobs[0].shape == (29, 384)
    chosen = logprobs[0].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, torch.tensor(whole[0].scores, dtype=torch.float64))
    assert divergence(logprobs[0], logprobs[1]).abs().max() < 1e-6
    assert divergence(logprobs[0], logprobs[0].roll(1, 0)).min() > 1e-3
