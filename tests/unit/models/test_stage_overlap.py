"""Stage 0 computes the next step while the stages behind it are still at this one."""

import threading
from pathlib import Path

import pytest

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from tests.support.generation import make_request, make_slice
from tests.support.thread_ranks import make_shards
from tests.support.tiny_models import make_tiny_llama

NUM_STEPS = 6
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_tiny_llama(tmp_path_factory.mktemp("overlap") / "m", num_layers=4)
    return EngineConfig(model=str(folder), max_model_len=256, pipeline_parallel=2)


def make_stages(engine: EngineConfig) -> list[ModelRunner]:
    folder = Path(engine.model)
    geometry = geometry_of(read_model_config(folder), engine)
    shards = make_shards(folder, engine)
    return [
        ModelRunner(load_model(folder, engine, shard), KvTensors(geometry, 16, part))
        for part, shard in zip(geometry.parts, shards, strict=True)
    ]


def make_plans() -> list[StepPlan]:
    """Chunks of one prompt: each needs the KV of the one before, and no token."""
    tokens = tuple(7 * index % 380 for index in range(64 * NUM_STEPS // 2))
    request = make_request(tokens)
    size = len(tokens) // NUM_STEPS
    return [
        StepPlan(slices=(make_slice(request, tokens, end - size, end, range(16)),))
        for end in range(size, len(tokens) + 1, size)
    ]


def test_a_stage_that_hangs_does_not_keep_stage_0_from_the_next_step(engine: EngineConfig):
    (leader, last), plans = make_stages(engine), make_plans()
    may_go_on = threading.Event()

    def follow() -> None:
        assert may_go_on.wait(TIMEOUT_S)
        for plan in plans:
            last.compute(plan)

    thread = threading.Thread(target=follow)
    thread.start()
    assert leader.max_steps_in_flight == 2
    steps = [leader.launch(plan) for plan in plans]
    may_go_on.set()
    results = [step.result() for step in steps]
    thread.join(TIMEOUT_S)
    assert [len(result.sampled) for result in results] == [0] * (NUM_STEPS - 1) + [1]


def test_steps_of_a_pipeline_give_the_tokens_of_one_rank(engine: EngineConfig):
    (leader, last), plans = make_stages(engine), make_plans()
    folder = Path(engine.model)
    alone = ModelRunner(
        load_model(folder, EngineConfig(model=str(folder), max_model_len=256)),
        KvTensors(geometry_of(read_model_config(folder), EngineConfig(model=str(folder))), 16),
    )
    expected: list[StepResult] = [alone.run(plan) for plan in plans]

    def follow() -> None:
        for plan in plans:
            last.compute(plan)

    thread = threading.Thread(target=follow)
    thread.start()
    steps = [leader.launch(plan) for plan in plans]
    assert [step.result() for step in steps] == expected
    thread.join(TIMEOUT_S)
