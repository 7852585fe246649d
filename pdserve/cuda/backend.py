"""Loads the engine of one GPU.

    weights -> table of products -> workspace and buffers -> one graph on trial -> KV -> all graphs

KV takes what is really free: weights and buffers are there when it is measured, and a graph was
captured to see what one costs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.cuda.attention import LayerAttention
from pdserve.cuda.device import Device
from pdserve.cuda.marks import LayerMarks, mark_steps
from pdserve.cuda.memory import MemoryPicture, fit_blocks
from pdserve.cuda.parts import EngineParts, make_parts
from pdserve.cuda.runner import CudaRunner
from pdserve.cuda.step_shape import StepShape
from pdserve.cuda.turn import taking_turn
from pdserve.errors import ConfigError
from pdserve.rank.backend import (
    Announce,
    LoadedParts,
    LoadJob,
    RankRunner,
    ReportPhase,
    StepResults,
)
from pdserve.rank.exchange import agree_on_least
from pdserve.timeline import Clock

MIB = 1 << 20
TURN_TIMEOUT_S = 60.0


class CudaBackend:
    """The `Backend` of a GPU."""

    def __init__(self, cache: Path | None) -> None:
        """Takes the folder of what is kept from start to start; None keeps nothing."""
        self._cache = cache

    def load(self, job: LoadJob, clock: Clock, report: ReportPhase) -> LoadedParts:
        """Loads weights, captures graphs and allocates KV.

        Raises:
            ConfigError: there is no GPU, something does not fit, or the model needs what the
                kernels cannot do.
        """
        _check(job)
        device = Device(torch.device("cuda"))
        # Ranks of one replica wait for one another as they load: taking turns, two replicas could
        # each have one rank's GPU and wait for the other's.
        is_alone = job.exchange is None
        with taking_turn(device.uuid, TURN_TIMEOUT_S) if is_alone else nullcontext():
            return self._load(job, device, clock, report)

    def _load(self, job: LoadJob, device: Device, clock: Clock, report: ReportPhase) -> LoadedParts:
        free_at_start = device.free_bytes()
        parts = make_parts(job, device, clock, report, cache=self._cache)
        num_blocks = _fit_kv(job, parts, free_at_start, clock, report)
        started_s = clock.now()
        kv = KvTensors(job.geometry, num_blocks, job.part, device.torch_device)
        room = num_blocks * job.geometry.block_size
        report("allocate KV", clock.now() - started_s, f"{room} tokens in {num_blocks} blocks")
        started_s = clock.now()
        runner = make_runner(job, parts, kv)
        captured = runner.capture()
        report(
            "capture graphs",
            clock.now() - started_s,
            f"{captured.num_graphs} graphs, {captured.num_bytes // MIB} MiB",
        )

        def give_runner(announce: Announce | None, results: StepResults | None) -> RankRunner:
            runner.announce, runner.results = announce, results
            return runner

        return LoadedParts(kv=kv, make_runner=give_runner, marks=runner.marks)


def make_runner(
    job: LoadJob,
    parts: EngineParts,
    kv: KvTensors,
    shapes: Sequence[StepShape] | None = None,
    *,
    is_trial: bool = False,
) -> CudaRunner:
    """Puts the parts over KV memory.

    Args:
        job: what was loaded.
        parts: of it.
        kv: the memory.
        shapes: to capture; None are all that the settings ask for.
        is_trial: computes padding alone, so that any KV will do for the longest sequence.
    """
    room = kv.num_blocks * job.geometry.block_size
    make_marks = None
    if job.mark_layers is not None and not is_trial:
        make_marks = partial(LayerMarks, mark_steps, job.part.layers, job.mark_layers)
    return CudaRunner(
        parts.model,
        kv,
        parts.device,
        inputs=parts.inputs,
        input_limits=parts.limits,
        max_model_len=job.max_model_len if is_trial else min(job.max_model_len, room),
        is_deterministic=job.engine.deterministic,
        graph_shapes=parts.shapes if shapes is None else shapes,
        stages=parts.stages,
        make_marks=make_marks,
    )


def _fit_kv(
    job: LoadJob, parts: EngineParts, free_at_start: int, clock: Clock, report: ReportPhase
) -> int:
    """Captures graphs over a scrap of KV, and sees what is left."""
    started_s = clock.now()
    device = parts.device
    scrap = KvTensors(job.geometry, 2, job.part, device.torch_device)
    keys, values = scrap.layer(0)
    read = LayerAttention(keys_SJD=keys, values_SJD=values, window=None)
    num_heads = parts.model.config.num_heads
    num_sizes = parts.attention.warm_up(read, num_heads, job.max_model_len)
    report("warm up attention", clock.now() - started_s, f"{num_sizes} sizes of chunks")
    started_s = clock.now()
    trial = make_runner(job, parts, scrap, (), is_trial=True)
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    lasting_bytes = torch.cuda.memory_allocated(device.torch_device)
    trial.compute_largest()
    passing_bytes = torch.cuda.max_memory_allocated(device.torch_device) - lasting_bytes
    graph_bytes = _measure_graphs(job, parts, scrap)
    del trial, scrap
    free_bytes = device.free_bytes()
    picture = MemoryPicture(
        total_bytes=device.total_bytes(),
        free_bytes=free_bytes,
        own_bytes=free_at_start - free_bytes,
        passing_bytes=passing_bytes,
        graph_bytes=graph_bytes,
        link_bytes=job.link_bytes,
        utilization=job.engine.gpu_memory_utilization,
    )
    report(
        "measure memory",
        clock.now() - started_s,
        f"{picture.own_bytes // MIB} MiB taken, {passing_bytes // MIB} MiB now and then, "
        f"{graph_bytes // MIB} MiB for graphs, {job.link_bytes // MIB} MiB kept for links",
    )
    num_blocks = fit_blocks(
        picture,
        block_bytes=job.geometry.bytes_per_block_on(job.part),
        block_size=job.geometry.block_size,
        wished_bytes=job.engine.kv_cache_memory_bytes,
        wished_tokens=job.engine.max_model_len,
    )
    return agree_on_least(job.exchange, "KV blocks", num_blocks)


def _measure_graphs(job: LoadJob, parts: EngineParts, scrap: KvTensors) -> int:
    """Returns the bytes that all graphs will take, by the largest one and the smallest."""
    if not parts.shapes:
        return 0
    taken: list[int] = []
    for shapes in (parts.shapes[:1], (parts.shapes[0], parts.shapes[-1])):
        trial = make_runner(job, parts, scrap, shapes, is_trial=True)
        taken.append(trial.capture().num_bytes)
        trial.drop_graphs()
    first, both = taken
    return first + max(MIB, both - first, both // 2) * len(parts.shapes)


def _check(job: LoadJob) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "device cuda needs a CUDA GPU and a torch built for it, found none",
            settings=("device",),
        )
