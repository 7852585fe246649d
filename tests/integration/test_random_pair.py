"""Random requests through both pools' engines on poisoned memory give the tokens each gives alone.

The same as `tests/gpu/test_poisoned.py` does on a GPU.
"""

from pathlib import Path

import pytest
import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import HandoffConfig
from pdserve.engine.batch import StepRunner
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of
from pdserve.models.registry import load_model
from tests.support.engine_pair import EnginePair
from tests.support.late_runner import LateRunner
from tests.support.poison import PoisonedRunner
from tests.support.random_pair import compare, expect_alone, make_visits, visit
from tests.support.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 4, 5))]
)
def test_LEDGER_random_visits_over_poisoned_memory_give_the_tokens_of_a_fresh_engine(
    folder: Path, seed: int
) -> None:
    poisoned: list[PoisonedRunner] = []

    def make_rank(
        folder: Path, engine: EngineConfig, num_blocks: int
    ) -> tuple[KvTensors, StepRunner]:
        model = load_model(folder, engine)
        kv = KvTensors(geometry_of(model.config, engine), num_blocks)
        poisoned.append(PoisonedRunner(LateRunner(ModelRunner(model, kv)), kv))
        return kv, poisoned[-1]

    visits = make_visits(seed, 18, 384, max_prompt=90, max_tokens=60, turns=20)
    pair = EnginePair(
        folder,
        prefill_blocks=24,
        decode_blocks=14,
        handoff=HandoffConfig(frame_tokens=64, lease_s=0.2),
        make_rank=make_rank,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    router = visit(pair, visits)
    num_ended = compare(router, visits, expect_alone(EnginePair(folder), visits))
    assert num_ended >= 14
    assert sum(runner.num_spoiled for runner in poisoned) > 1000
    counters = pair.decode.describe().counters
    assert counters.handoffs_completed >= 3
    assert router.num_returned >= 1
    assert counters.prefix_cache_hits > 0
