"""A model on several ranks computes what it does on one; the ranks are threads of this process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import SequenceSlice
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import ConfigError
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from tests.support.generation import compute_logits, make_request, make_slice
from tests.support.kv import whole_blocks
from tests.support.thread_ranks import make_shards
from tests.support.tiny_models import make_tiny, make_tiny_llama, make_tiny_qwen2

SIZES = {
    "hidden": 96,
    "heads": 8,
    "kv_heads": 4,
    "intermediate": 290,
    "num_layers": 3,
    "vocab": 391,
}
PROMPT = tuple((7 * index) % 380 for index in range(90))
BLOCKS = (5, 1, 4, 0, 2, 7, 3)


class ThreadRanks:
    """All ranks of a replica."""

    def __init__(self, folder: Path, engine: EngineConfig) -> None:
        config = read_model_config(folder)
        self.geometry = geometry_of(config, engine)
        self.runners = []
        shards = make_shards(folder, engine)
        for part, shard in zip(self.geometry.parts, shards, strict=True):
            model = load_model(folder, engine, shard)
            self.runners.append(ModelRunner(model, KvTensors(self.geometry, 8, part)))
        self._pool = ThreadPoolExecutor(len(self.runners))

    def logits(self, *slices: SequenceSlice) -> Tensor:
        futures = [self._pool.submit(compute_logits, runner, *slices) for runner in self.runners]
        logits_by_rank = [future.result(30) for future in futures]
        return logits_by_rank[0]


def run_steps(compute: Callable[..., Tensor]) -> list[Tensor]:
    """Prefills in chunks, then decodes two tokens."""
    tokens = [*PROMPT, 11, 23]
    request = make_request(PROMPT)
    found = []
    for start, end in ((0, 50), (50, 90), (90, 91), (91, 92)):
        part = make_slice(request, tokens, start, end, BLOCKS)
        if end in (91, 92) or end == 90:
            part = replace(part, output_index=end - len(PROMPT))
        found.append(compute(part))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("sharded"), **SIZES)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (4, 1), (8, 1), (1, 2), (1, 3), (2, 2)])
def test_A15_float32_logits_and_kv_are_bit_equal_on_any_number_of_ranks(
    folder: Path, tensor: int, stages: int
) -> None:
    engine = EngineConfig(model=str(folder), max_model_len=256)
    single = ModelRunner(
        load_model(folder, engine), KvTensors(geometry_of(read_model_config(folder), engine), 8)
    )
    expected = run_steps(lambda part: compute_logits(single, part))
    ranks = ThreadRanks(folder, replace(engine, tensor_parallel=tensor, pipeline_parallel=stages))
    found = run_steps(ranks.logits)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for runner in ranks.runners:
        region = whole_blocks(runner.kv, BLOCKS[:6])
        region = replace(region, num_tokens=92)
        assert torch.equal(runner.kv.pack(region), single.kv.pack(region))


def test_A15_a_model_of_smollm2s_sizes_is_bit_equal_on_three_ranks(tmp_path: Path) -> None:
    sizes = {"hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 1536, "num_layers": 2}
    folder = make_tiny_llama(tmp_path / "m", **sizes, vocab=1024, is_tied=True)
    engine = EngineConfig(model=str(folder), max_model_len=256)
    single = ModelRunner(
        load_model(folder, engine), KvTensors(geometry_of(read_model_config(folder), engine), 8)
    )
    expected = run_steps(lambda part: compute_logits(single, part))
    ranks = ThreadRanks(folder, replace(engine, tensor_parallel=3))
    for one, other in zip(run_steps(ranks.logits), expected, strict=True):
        assert torch.equal(one, other)


def test_A15_more_ranks_than_vectors_of_the_feed_forward_part_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", **{**SIZES, "intermediate": 100})
    engine = EngineConfig(model=str(folder), max_model_len=256, tensor_parallel=4)
    with pytest.raises(ConfigError, match="tensor_parallel must be at most intermediate_size 100"):
        ThreadRanks(folder, engine)


@pytest.mark.parametrize(
    ("family", "over"),
    [("qwen3", {}), ("mistral", {"sliding_window": 40}), ("smollm3", {})],
)
def test_A15_every_family_is_bit_equal_on_ranks_and_stages(
    tmp_path: Path, family: str, over: dict[str, object]
) -> None:
    folder = make_tiny(tmp_path / "m", family, **SIZES, **over)
    engine = EngineConfig(model=str(folder), max_model_len=256)
    single = ModelRunner(
        load_model(folder, engine), KvTensors(geometry_of(read_model_config(folder), engine), 8)
    )
    expected = run_steps(lambda part: compute_logits(single, part))
    ranks = ThreadRanks(folder, replace(engine, tensor_parallel=2, pipeline_parallel=3))
    for one, other in zip(run_steps(ranks.logits), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_tied", [False, True])
def test_A15_biases_and_tied_embeddings_are_shared_as_well(tmp_path: Path, is_tied: bool) -> None:
    folder = make_tiny_qwen2(tmp_path / "m", **SIZES, is_tied=is_tied)
    engine = EngineConfig(model=str(folder), max_model_len=256)
    single = ModelRunner(
        load_model(folder, engine), KvTensors(geometry_of(read_model_config(folder), engine), 8)
    )
    expected = run_steps(lambda part: compute_logits(single, part))
    ranks = ThreadRanks(folder, replace(engine, tensor_parallel=4, pipeline_parallel=2))
    for one, other in zip(run_steps(ranks.logits), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (8, 1), (2, 3)])
def test_bfloat16_logits_are_close_on_any_number_of_ranks(
    folder: Path, tensor: int, stages: int
) -> None:
    engine = EngineConfig(model=str(folder), max_model_len=256, dtype="bfloat16")
    single = ModelRunner(
        load_model(folder, engine), KvTensors(geometry_of(read_model_config(folder), engine), 8)
    )
    expected = run_steps(lambda part: compute_logits(single, part))
    ranks = ThreadRanks(folder, replace(engine, tensor_parallel=tensor, pipeline_parallel=stages))
    for one, other in zip(run_steps(ranks.logits), expected, strict=True):
        assert one.shape == other.shape
        assert torch.nn.functional.cosine_similarity(one, other).gt(0.99).all()
