"""Engines that several tests use one after another, loaded once."""

from collections import Counter
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import StepRunner
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of
from pdserve.models.llama import LlamaModel
from pdserve.models.registry import load_model
from tests.support.cuda_engine import make_cuda_runner
from tests.support.engine_pair import EnginePair


class EngineShelf:
    """Lends runners of one device; who takes one finds NaN in all of its KV."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._runners: dict[tuple[EngineConfig, int, int], CudaRunner] = {}
        self._models: dict[Path, LlamaModel] = {}

    def take(
        self, folder: Path, engine: EngineConfig, num_blocks: int, index: int = 0
    ) -> CudaRunner:
        """Takes one of several that are alike; whoever has it now must have ended."""
        key = (engine, num_blocks, index)
        if key not in self._runners:
            self._runners[key] = make_cuda_runner(folder, engine, num_blocks, self._device)
        runner = self._runners[key]
        for layer in range(runner.model.config.num_layers):
            for part in runner.kv.layer(layer):
                part.fill_(torch.nan)
        if self._device == "cuda":
            # The next engine of this thread computes on a stream of its own.
            torch.cuda.synchronize()
        return runner

    def make_pair(self, folder: Path, **options: object) -> EnginePair:
        """Makes a pair over two runners."""
        taken: Counter[EngineConfig] = Counter()

        def make_rank(
            folder: Path, engine: EngineConfig, num_blocks: int
        ) -> tuple[KvTensors, StepRunner]:
            runner = self.take(folder, engine, num_blocks, taken[engine])
            taken[engine] += 1
            return runner.kv, runner

        return EnginePair(folder, make_rank=make_rank, device=self._device, **options)

    def take_cpu(
        self, folder: Path, engine: EngineConfig, num_blocks: int
    ) -> tuple[KvTensors, ModelRunner]:
        """Makes the CPU's engine over weights that were loaded once, in float32."""
        if folder not in self._models:
            self._models[folder] = load_model(folder, engine)
        model = self._models[folder]
        kv = KvTensors(geometry_of(model.config, engine), num_blocks)
        return kv, ModelRunner(model, kv)
