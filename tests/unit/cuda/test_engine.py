"""The engine as a GPU runs it, kernels in Triton's interpreter, against the CPU's model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.registry import load_model
from pdserve.request import BlockId, SamplingParams
from tests.support import generation
from tests.support.cuda_engine import make_cuda_runner
from tests.support.random_load import make_arrivals, play
from tests.support.tiny_models import make_tiny

PROMPT = tuple(range(40, 61))
BLOCKS = (3, 1)


def settings(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), max_model_len=64, max_num_seqs=3, max_num_batched_tokens=48
    )


def make_pair(folder: Path) -> tuple[ModelRunner, CudaRunner]:
    engine = settings(folder)
    ours = make_cuda_runner(folder, engine, 8)
    for layer in range(ours.model.config.num_layers):
        for part in ours.kv.layer(layer):
            part.fill_(torch.nan)
    return generation.make_runner(load_model(folder, engine), engine, 8), ours


@pytest.mark.parametrize(
    ("family", "over"),
    [
        ("llama", {"is_tied": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("mistral", {"sliding_window": 9}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
    ],
)
def test_each_family_gives_the_cpus_tokens_and_kv(
    tmp_path: Path, family: str, over: dict[str, object]
) -> None:
    theirs, ours = make_pair(make_tiny(tmp_path, family, **over))
    request = generation.make_request(PROMPT)
    expected = generation.generate(theirs, request, 3, BLOCKS, chunk_tokens=16)
    assert generation.generate(ours, request, 3, BLOCKS, chunk_tokens=16) == expected
    slots = [BLOCKS[place // 16] * 16 + place % 16 for place in range(len(PROMPT) + 2)]
    for layer in range(ours.model.config.num_layers):
        for made, known in zip(ours.kv.layer(layer), theirs.kv.layer(layer), strict=True):
            torch.testing.assert_close(made[slots], known[slots], rtol=0, atol=2e-4)
            assert int(made.isnan().all(dim=(1, 2)).sum()) == made.shape[0] - len(slots)


def test_random_load_with_two_steps_in_flight_gives_the_cpus_tokens(
    tiny_llama_folder: Path,
) -> None:
    theirs, ours = make_pair(tiny_llama_folder)
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
    )
    arrivals = make_arrivals(
        2, 5, 384, max_prompt=20, max_tokens=3, params=params, cancel_rate=0.2, turns=3
    )
    engine = settings(tiny_llama_folder)
    assert play(engine, 5, ours, arrivals) == play(engine, 5, theirs, arrivals)
    assert ours.counters.host_tokens > 0


def test_prompt_scores_are_the_cpus(tiny_llama_folder: Path) -> None:
    theirs, ours = make_pair(tiny_llama_folder)
    request = generation.make_request(
        PROMPT, sampling=SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=2)
    )
    part = replace(
        generation.make_slice(request, PROMPT, 0, len(PROMPT), BLOCKS), prompt_targets=PROMPT[1:]
    )
    made, known = ours.run(StepPlan(slices=(part,))), theirs.run(StepPlan(slices=(part,)))
    assert made.sampled.keys() == known.sampled.keys()
    token, expected = made.sampled[request.request_id], known.sampled[request.request_id]
    assert token.token_id == expected.token_id
    assert token.logprobs is not None
    assert expected.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)
    pairs = zip(
        made.prompt_logprobs[request.request_id],
        known.prompt_logprobs[request.request_id],
        strict=True,
    )
    for one, other in pairs:
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ()}, "empty slice"),
        ({"token_ids": (9, 400)}, r"must be in \[0, 384\), got 400"),
        ({"token_ids": (-1, 9)}, r"must be in \[0, 384\), got -1"),
        ({"start": 63, "block_ids": (1, 2, 3, 4, 5)}, "reaches 65 tokens, over the limit of 64"),
        ({"start": 15, "block_ids": (1,)}, "needs blocks for 17 tokens, got 1 of 16"),
        ({"block_ids": (8,)}, r"block ids must be in \[0, 8\)"),
        ({"token_ids": (), "awaits_token": True}, "awaits a token that no step samples"),
    ],
)
def test_a_plan_out_of_range_is_refused(
    refusing: CudaRunner, change: dict[str, object], message: str
) -> None:
    part = SequenceSlice(
        request=generation.make_request((1, 2)),
        start=0,
        token_ids=(1, 2),
        block_ids=(BlockId(1),),
        output_index=0,
    )
    with pytest.raises(ValueError, match=message):
        refusing.launch(StepPlan(slices=(replace(part, **change),)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def refusing(tiny_llama_folder: Path) -> CudaRunner:
    return make_cuda_runner(tiny_llama_folder, settings(tiny_llama_folder), 8)
