"""The CUDA engine on whatever device there is: the CPU with Triton's interpreter, or a GPU."""

from pathlib import Path

import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.cuda.backend import make_runner
from pdserve.cuda.device import Device
from pdserve.cuda.parts import make_parts
from pdserve.cuda.runner import CudaRunner
from pdserve.models.folder import effective_max_model_len, geometry_of, read_model_config
from pdserve.rank.backend import LoadJob
from pdserve.timeline import MonotonicClock


def make_job(folder: Path, engine: EngineConfig, mark_layers: int | None = None) -> LoadJob:
    config = read_model_config(folder)
    geometry = geometry_of(config, engine)
    return LoadJob(
        folder=folder,
        engine=engine,
        model=config,
        geometry=geometry,
        part=geometry.parts[0],
        shard=None,
        max_model_len=effective_max_model_len(config, engine.max_model_len),
        mark_layers=mark_layers,
    )


def make_cuda_runner(
    folder: Path,
    engine: EngineConfig,
    num_blocks: int = 32,
    device: str = "cpu",
    mark_layers: int | None = None,
) -> CudaRunner:
    job, place = make_job(folder, engine, mark_layers), Device(torch.device(device))
    parts = make_parts(job, place, MonotonicClock(), lambda name, seconds, detail: None)
    kv = KvTensors(job.geometry, num_blocks, job.part, place.torch_device)
    runner = make_runner(job, parts, kv)
    if parts.shapes:
        runner.capture()
    return runner


def step_buffers(runner: CudaRunner) -> list[Tensor]:
    """Returns all that the kernels of a step write and read again: nothing lasts to the next."""
    workspace = vars(runner.model._workspace).values()
    attention = runner.model.attention
    scratches = (attention._decode_scratch, attention._prompt_scratch)
    return [
        *(one for one in workspace if isinstance(one, Tensor)),
        *(part for scratch in scratches for part in (scratch.partials, scratch.log_sums)),
    ]
