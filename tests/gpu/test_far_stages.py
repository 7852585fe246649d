"""Two pipeline stages that are joined by NCCL over sockets, as those of two hosts are."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.cuda.nccl import NcclFault
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import StepPlan
from pdserve.request import BlockId, SamplingParams
from pdserve.rpc.channel import ChannelClosed
from tests.gpu.test_engine import PARAMS, settings
from tests.support import generation
from tests.support.cuda_engine import make_cuda_runner
from tests.support.device_ranks import RankChildren, device_ranks
from tests.support.gpus import needs_gpus
from tests.support.random_load import make_arrivals, play
from tests.support.tiny_models import make_tiny

NUM_BLOCKS = 40
GREEDY = (SamplingParams(temperature=0.0),)

pytestmark = needs_gpus(2, "NCCL joins the stages")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_tiny(
        tmp_path_factory.mktemp("tiny64"),
        "llama",
        hidden=256,
        heads=4,
        kv_heads=2,
        intermediate=512,
        max_position=4096,
    )
    return replace(settings(folder), pipeline_parallel=2)


@pytest.fixture(scope="module")
def pair(
    engine: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CudaRunner, RankChildren]]:
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with pytest.MonkeyPatch.context() as patch:
        # As between hosts: neither NVLink nor shared memory.
        patch.setenv("NCCL_P2P_DISABLE", "1")
        patch.setenv("NCCL_SHM_DISABLE", "1")
        with device_ranks(engine, meeting, NUM_BLOCKS, "cuda+far") as made:
            yield made


@pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled"])
def test_TOK_stages_on_wires_give_the_tokens_of_one_gpu(
    engine: EngineConfig,
    pair: tuple[CudaRunner, RankChildren],
    params: tuple[SamplingParams, ...],
) -> None:
    whole = replace(engine, pipeline_parallel=1)
    alone = make_cuda_runner(Path(engine.model), whole, NUM_BLOCKS, "cuda")
    arrivals = make_arrivals(5, 24, 384, max_prompt=90, max_tokens=24, params=params, turns=20)
    runner, _ = pair
    began_s = time.monotonic()
    made = play(engine, NUM_BLOCKS, runner, arrivals)
    print(f"{runner.counters.steps} steps in {time.monotonic() - began_s:.2f} s")
    expected = play(whole, NUM_BLOCKS, alone, arrivals)
    common = made.keys() & expected.keys()
    assert len(common) >= 12
    different = [name for name in common if made[name] != expected[name]]
    # A random draw may fall on the other side of a rounding; float32 makes that rare.
    assert len(different) <= (0 if params is GREEDY else 1)
    assert runner.counters.graph_steps > 0


def test_B9_the_death_of_a_far_stage_ends_steps_and_leaves_the_device_usable(
    engine: EngineConfig, pair: tuple[CudaRunner, RankChildren]
) -> None:
    """Comes last: its pair is not used again."""
    runner, children = pair
    prompt = tuple(range(40, 61))
    request = generation.make_request(prompt)
    blocks = tuple(BlockId(block) for block in (3, 1))
    plan = StepPlan(slices=(generation.make_slice(request, prompt, 0, len(prompt), blocks),))
    children.processes[0].kill()
    children.processes[0].wait()
    runner.announce = None
    began_s = time.monotonic()
    for _ in range(2):
        with pytest.raises((ChannelClosed, NcclFault)):
            runner.launch(plan).result()
    assert runner._stages is not None
    runner._stages.close()
    torch.cuda.synchronize()
    assert time.monotonic() - began_s < 10
    assert torch.ones(8, device="cuda").sum().item() == 8
