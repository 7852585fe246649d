"""Two tensor ranks, a process each: the tokens of one GPU, and the end of both.

They are on two GPUs, or share one: nothing between them needs NCCL.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import StepPlan
from pdserve.errors import WorkerLost
from pdserve.request import BlockId, RequestId, SamplingParams
from tests.gpu.test_engine import PARAMS, plan_of, settings
from tests.support import generation
from tests.support.cuda_engine import make_cuda_runner
from tests.support.device_ranks import RankChildren, device_ranks
from tests.support.random_load import make_arrivals, play
from tests.support.tiny_models import make_tiny

NUM_BLOCKS = 40
NUM_POLLS = 1 << 20
GREEDY = (SamplingParams(temperature=0.0),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny64")
    return make_tiny(
        path, "llama", hidden=256, heads=4, kv_heads=2, intermediate=512, max_position=4096
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineConfig:
    return replace(settings(folder), tensor_parallel=2)


@pytest.fixture(scope="module")
def pair(
    engine: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CudaRunner, RankChildren]]:
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with device_ranks(engine, meeting, NUM_BLOCKS, "cuda") as made:
        yield made


@pytest.fixture(scope="module")
def alone(folder: Path) -> CudaRunner:
    return make_cuda_runner(folder, settings(folder), NUM_BLOCKS, "cuda")


def test_TOK_greedy_tokens_of_two_ranks_are_those_of_one_gpu(
    engine: EngineConfig, pair: tuple[CudaRunner, RankChildren], alone: CudaRunner
) -> None:
    arrivals = make_arrivals(3, 24, 384, max_prompt=90, max_tokens=24, params=GREEDY, turns=20)
    runner, _ = pair
    made = play(engine, NUM_BLOCKS, runner, arrivals)
    expected = play(engine, NUM_BLOCKS, alone, arrivals)
    common = made.keys() & expected.keys()
    assert len(common) >= 12
    assert [name for name in common if made[name] != expected[name]] == []
    assert runner.counters.graph_steps > 0


def test_every_kind_of_sampling_gives_the_tokens_of_one_gpu(
    engine: EngineConfig, pair: tuple[CudaRunner, RankChildren], alone: CudaRunner
) -> None:
    arrivals = make_arrivals(7, 24, 384, max_prompt=60, max_tokens=24, params=PARAMS, turns=20)
    made = play(engine, NUM_BLOCKS, pair[0], arrivals)
    expected = play(engine, NUM_BLOCKS, alone, arrivals)
    common = made.keys() & expected.keys()
    assert len(common) >= 12
    # A random draw may fall on the other side of a rounding; float32 makes that rare.
    different = [name for name in common if made[name] != expected[name]]
    assert len(different) <= 1, {name: (made[name], expected[name]) for name in different}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_ranks_give_the_same_bits_at_every_batch_size(
    engine: EngineConfig, tmp_path: Path, dtype: str
) -> None:
    engine = replace(
        engine,
        deterministic=True,
        dtype=dtype,  # type: ignore[arg-type]  # a parameter of the test
        max_num_seqs=64,
        max_num_batched_tokens=4096,
    )
    numbers = torch.Generator().manual_seed(3)
    tokens = [tuple(torch.randint(3, 384, (60,), generator=numbers).tolist()) for _ in range(64)]
    seen = []
    with device_ranks(engine, tmp_path / "meeting", 4 * 64, "cuda") as (runner, _):
        for batch, ends in ((1, (50, 60)), (8, (50, 60)), (64, (50, 60)), (8, (20, 37, 50, 60))):
            start = 0
            for end in (*ends[:-1], *range(ends[-2] + 1, ends[-1] + 1)):
                result = runner.run(plan_of(batch, start, end, tokens))
                start = end
            token = result.sampled[RequestId("r0")]
            keys, values = runner.kv.layer(runner.model.config.num_layers - 1)
            seen.append((token, keys[:60].clone(), values[:60].clone()))
    for token, keys, values in seen[1:]:
        assert token == seen[0][0]
        assert torch.equal(keys, seen[0][1])
        assert torch.equal(values, seen[0][2])


def test_B9_a_rank_that_died_is_missed_and_then_not_waited_for(
    engine: EngineConfig, tmp_path: Path
) -> None:
    prompt = tuple(range(40, 61))
    request = generation.make_request(prompt)
    blocks = tuple(BlockId(block) for block in (3, 1))
    plan = generation.make_slice(request, prompt, 0, len(prompt), blocks)
    eager = replace(engine, enforce_eager=True)
    with device_ranks(eager, tmp_path / "meeting", NUM_BLOCKS, "cuda") as (runner, children):
        runner.run(StepPlan(slices=(plan,)))
        children.processes[0].kill()
        children.processes[0].wait()
        runner.announce = None
        assert runner.model.ranks is not None
        runner.model.ranks.set_patience(NUM_POLLS)
        began_s = time.monotonic()
        with pytest.raises(WorkerLost, match="in time"):
            runner.run(StepPlan(slices=(plan,)))
        took_s = time.monotonic() - began_s
        print(f"{NUM_POLLS} polls took {took_s:.2f} s")
        assert took_s < 10
        # Nothing is waited for any more.
        began_s = time.monotonic()
        with pytest.raises(WorkerLost):
            runner.run(StepPlan(slices=(plan,)))
        assert time.monotonic() - began_s < 1
