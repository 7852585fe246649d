from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.rank.loading import RankArguments, load_rank
from pdserve.rank.meeting import FolderMeeting
from pdserve.request import Incarnation, Role
from pdserve.timeline import MonotonicClock
from tests.support.models import tiny_llama_folder

__all__ = ["tiny_llama_folder"]

ARGUMENTS = RankArguments(
    incarnation=Incarnation(1), rank=0, meeting=FolderMeeting(Path()), rank_channels=()
)


def settings(folder: Path, **over: object) -> WorkerConfig:
    engine = EngineConfig(model=str(folder), kv_cache_memory_bytes=1 << 20)
    return WorkerConfig(
        role=Role.DECODE,
        worker_id="d0",
        redis_url="redis://127.0.0.1:1",
        engine=replace(engine, **over),  # type: ignore[arg-type]  # fields of EngineConfig
    )


def test_phases_are_reported_and_the_memory_bounds_the_length(tiny_llama_folder: Path) -> None:
    phases: list[str] = []
    loaded = load_rank(
        settings(tiny_llama_folder),
        ARGUMENTS,
        MonotonicClock(),
        lambda name, seconds, detail: phases.append(name),
    )
    assert phases == ["load weights", "allocate KV"]
    assert loaded.max_model_len == min(2048, loaded.kv.num_blocks * 16)
    assert loaded.make_runner(None, None).max_steps_in_flight == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_loaded(
    tiny_llama_folder: Path,
) -> None:
    with pytest.raises(ConfigError, match="device cuda needs a CUDA GPU"):
        load_rank(
            settings(tiny_llama_folder, device="cuda"),
            ARGUMENTS,
            MonotonicClock(),
            lambda name, seconds, detail: None,
        )


def test_random_weights_of_another_device_are_another_model(tiny_llama_folder: Path) -> None:
    engine = EngineConfig(model=str(tiny_llama_folder), load_format="dummy")
    config = read_model_config(tiny_llama_folder)
    on_cpu = geometry_of(config, engine)
    on_gpu = geometry_of(config, replace(engine, device="cuda"))
    assert on_cpu.digest() != on_gpu.digest()
    real = replace(engine, load_format="auto")
    assert geometry_of(config, real) == geometry_of(config, replace(real, device="cuda"))
