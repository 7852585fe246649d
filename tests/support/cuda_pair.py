"""Both pools' engines with the runners of a GPU: frames leave one memory and land in the other."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import StepRunner
from pdserve.request import Request
from tests.support.cuda_engine import make_cuda_runner
from tests.support.engine_pair import EnginePair
from tests.support.pair_router import PairRouter

RunnerWrap = Callable[[CudaRunner], StepRunner]


def make_cuda_pair(
    folder: Path, device: str = "cpu", *, wrap: RunnerWrap | None = None, **options: object
) -> EnginePair:
    """Makes a pair on one device; on the CPU kernels run in Triton's interpreter.

    Args:
        folder: of the model.
        device: of both engines.
        wrap: puts something around each runner.
        options: of `EnginePair`.
    """
    kind = torch.device(device).type
    make_rank = partial(_make_rank, device=device, wrap=wrap)
    return EnginePair(folder, make_rank=make_rank, device=kind, **options)


def run_colocated(pair: EnginePair, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Lets the decode engine compute prompts and outputs; returns output ids by request."""
    router = PairRouter(pair)
    for request in requests:
        router.adopt(request)
        pair.submit(request, is_local=True)
    for _ in range(4000):
        pair.turn()
        router.read()
        if not router.open:
            pair.settle()
            return router.outputs
    raise AssertionError(f"still open: {sorted(router.open)}")


def _make_rank(
    folder: Path,
    engine: EngineConfig,
    num_blocks: int,
    *,
    device: str,
    wrap: RunnerWrap | None,
) -> tuple[KvTensors, StepRunner]:
    runner = make_cuda_runner(folder, engine, num_blocks, device)
    if torch.device(device).type == "cuda":
        # The next engine of this thread computes on a stream of its own.
        torch.cuda.synchronize()
    return runner.kv, runner if wrap is None else wrap(runner)
