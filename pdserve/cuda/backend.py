"""Loads the engine of one GPU.

    weights -> table of products -> workspace and buffers -> one graph on trial -> KV -> all graphs

KV takes what is really free: weights and buffers are there when it is measured, and a graph was
captured to see what one costs.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import TORCH_DTYPES, KvTensors
from pdserve.cuda.attention import SPLIT_ROWS, AttentionRoom, LayerAttention
from pdserve.cuda.device import Device
from pdserve.cuda.far_stages import FarStages
from pdserve.cuda.marks import LayerMarks, mark_steps
from pdserve.cuda.memory import MemoryPicture, fit_blocks
from pdserve.cuda.model import CudaModel, make_rotary_tables
from pdserve.cuda.plans import choose_plans
from pdserve.cuda.products import Products, max_product_bytes
from pdserve.cuda.runner import CudaRunner
from pdserve.cuda.stages import StageRoom, Stages, connect_device_stages, count_hosts
from pdserve.cuda.step_inputs import InputLimits, StepInputs
from pdserve.cuda.step_shape import StepShape, graph_shapes
from pdserve.cuda.tensor_ranks import MAX_RING_ROWS, MemoryKind, TensorRanks, connect_tensor_ranks
from pdserve.cuda.turn import taking_turn
from pdserve.cuda.weights import DeviceDummyWeights, load_weights
from pdserve.cuda.wires import MakeWires, connect_nccl_wires
from pdserve.cuda.workspace import Workspace, WorkspaceSize
from pdserve.errors import ConfigError
from pdserve.kernels import decode_scratch, prefill_attention
from pdserve.models.llama import narrow_config
from pdserve.models.weights import WeightSource
from pdserve.models.weights_safetensors import SafetensorsWeights
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

logger = logging.getLogger(__name__)

BALANCED_SPLITS = 32
"""Most splits of a sequence's KV, at every batch size: so few kernels are compiled."""
FIXED_SPLIT_TOKENS = 512
MIB = 1 << 20
TURN_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """Everything but the KV."""

    device: Device
    attention: AttentionRoom
    model: CudaModel
    inputs: StepInputs
    limits: InputLimits
    shapes: tuple[StepShape, ...]
    stages: Stages | None


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


def make_parts(
    job: LoadJob,
    device: Device,
    clock: Clock,
    report: ReportPhase,
    memory_kind: MemoryKind | None = None,
    *,
    make_wires: MakeWires | None = None,
    cache: Path | None = None,
) -> EngineParts:
    """Loads weights, chooses products and allocates buffers.

    Args:
        job: what to load.
        device: that computes.
        clock: of the phases.
        report: takes them.
        memory_kind: how ranks share memory; None: between GPUs.
        make_wires: joins the stages even in one host; None: by NCCL, where they are in several.
        cache: folder of product tables; None keeps none.
    """
    started_s = clock.now()
    dtype, engine, config = TORCH_DTYPES[job.engine.dtype], job.engine, job.model
    source: WeightSource
    if engine.load_format == "dummy":
        source = DeviceDummyWeights(engine.seed, device.torch_device, dtype)
    else:
        source = SafetensorsWeights(job.folder)
    if job.shard is not None:
        config = narrow_config(job.shard)
    weights = load_weights(config, source, dtype, device.torch_device, job.shard)
    device.synchronize()
    report("load weights", clock.now() - started_s, f"{engine.dtype} on {device.name}")
    started_s = clock.now()
    plans = choose_plans(weights, device, is_fixed=engine.deterministic, cache=cache)
    report("choose products", clock.now() - started_s, plans.summary)
    limits = InputLimits(
        max_rows=max(engine.max_num_batched_tokens, engine.max_num_seqs),
        max_seqs=engine.max_num_seqs,
        max_samples=max(engine.max_num_seqs, 8),
        max_blocks=-(-job.max_model_len // engine.block_size),
    )
    size = WorkspaceSize(
        max_rows=limits.max_rows,
        max_sample_rows=limits.max_samples,
        max_product_bytes=max_product_bytes(config, plans.choose, limits.max_rows, dtype),
        logits_columns=weights.head_VE.shape[0],
    )
    workspace = Workspace(config, size, dtype, device.torch_device)
    split_tokens = FIXED_SPLIT_TOKENS if engine.deterministic else None
    max_splits = BALANCED_SPLITS
    if split_tokens is not None:
        max_splits = max(2, -(-job.max_model_len // split_tokens))
    heads, head_dim, place = config.num_heads, config.head_dim, device.torch_device
    attention = AttentionRoom(
        decode_scratch.make_scratch(limits.max_samples, heads, head_dim, max_splits, place),
        prefill_attention.make_scratch(SPLIT_ROWS, heads, head_dim, 1, place),
        block_size=engine.block_size,
        head_dim=head_dim,
        split_tokens=split_tokens,
        # A row's bits depend there on the chunk that it came in.
        has_dense=device.has_dependent_launch and not engine.deterministic,
        max_rows=engine.max_num_batched_tokens,
        use_pdl=device.has_dependent_launch,
    )
    model = CudaModel(
        config,
        weights,
        make_rotary_tables(config, job.max_model_len, device.torch_device),
        workspace,
        Products(workspace, plans.choose, use_pdl=device.has_dependent_launch),
        attention,
        use_pdl=device.has_dependent_launch,
        ranks=_connect_ranks(job, limits, device, memory_kind),
        shard=job.shard,
    )
    stages = _connect_stages(job, limits, device, memory_kind, make_wires)
    shapes = graph_shapes(engine.max_num_seqs, limits.max_rows, engine.tensor_parallel)
    return EngineParts(
        device=device,
        attention=attention,
        model=model,
        inputs=_make_inputs(limits, device, stages),
        limits=limits,
        shapes=() if engine.enforce_eager or not device.is_cuda else shapes,
        stages=stages,
    )


def _make_inputs(limits: InputLimits, device: Device, stages: Stages | None) -> StepInputs:
    if stages is None:
        return StepInputs(limits, device)
    room = stages.room
    return StepInputs(
        limits, device, num_lanes=room.num_stages, max_in_flight=room.max_steps_in_flight
    )


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


def _connect_ranks(
    job: LoadJob, limits: InputLimits, device: Device, memory_kind: MemoryKind | None
) -> TensorRanks | None:
    """Meets the other tensor ranks of this stage; None where there are none."""
    shard, config = job.shard, job.model
    if shard is None or shard.tensor_parallel == 1:
        return None
    assert job.exchange is not None
    first = shard.part.stage * shard.tensor_parallel
    # Room for the activations of the largest step, and for a row of logits at the least.
    num_bytes = max(
        min(limits.max_rows, MAX_RING_ROWS)
        * config.hidden_size
        * TORCH_DTYPES[job.engine.dtype].itemsize,
        (config.vocab_size // shard.tensor_parallel + 4) * torch.float32.itemsize,
    )
    members = range(first, first + shard.tensor_parallel)
    return connect_tensor_ranks(
        job.exchange,
        members,
        num_bytes,
        device,
        memory_kind,
        is_deterministic=job.engine.deterministic,
    )


def _connect_stages(
    job: LoadJob,
    limits: InputLimits,
    device: Device,
    memory_kind: MemoryKind | None,
    make_wires: MakeWires | None,
) -> Stages | None:
    """Meets the stages before and behind; None where there is one."""
    shard = job.shard
    if shard is None or shard.num_stages == 1:
        return None
    assert job.exchange is not None
    room = StageRoom(
        num_stages=shard.num_stages,
        max_rows=limits.max_rows,
        max_samples=limits.max_samples,
        hidden_size=job.model.hidden_size,
        dtype=TORCH_DTYPES[job.engine.dtype],
    )
    if count_hosts(job.exchange) > 1 and make_wires is None:
        make_wires = connect_nccl_wires
    if make_wires is None:
        return connect_device_stages(job.exchange, shard, room, device, memory_kind)
    return FarStages(shard, room, device, *make_wires(job.exchange, shard, device.torch_device))


def _check(job: LoadJob) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "device cuda needs a CUDA GPU and a torch built for it, found none",
            settings=("device",),
        )
