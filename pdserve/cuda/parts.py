"""What the engine of one GPU is made of, but for its KV."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import TORCH_DTYPES
from pdserve.config.engine import EngineConfig
from pdserve.config.model import ModelConfig
from pdserve.cuda.attention import SPLIT_ROWS, AttentionRoom
from pdserve.cuda.device import Device
from pdserve.cuda.far_stages import FarStages
from pdserve.cuda.model import CudaModel, make_rotary_tables
from pdserve.cuda.plans import ProductPlans, choose_plans
from pdserve.cuda.products import Products, max_product_bytes
from pdserve.cuda.stages import StageRoom, Stages, connect_device_stages, count_hosts
from pdserve.cuda.step_inputs import InputLimits, StepInputs
from pdserve.cuda.step_shape import StepShape, graph_shapes
from pdserve.cuda.tensor_ranks import MAX_RING_ROWS, MemoryKind, TensorRanks, connect_tensor_ranks
from pdserve.cuda.weights import DeviceDummyWeights, ModelWeights, load_weights
from pdserve.cuda.wires import MakeWires, connect_nccl_wires
from pdserve.cuda.workspace import Workspace, WorkspaceSize
from pdserve.kernels import decode_scratch, prefill_attention
from pdserve.models.llama import narrow_config
from pdserve.models.weights import WeightSource
from pdserve.models.weights_safetensors import SafetensorsWeights
from pdserve.rank.backend import LoadJob, ReportPhase
from pdserve.timeline import Clock

BALANCED_SPLITS = 32
"""Most splits of a sequence's KV, at every batch size: so few kernels are compiled."""
FIXED_SPLIT_TOKENS = 512


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
    engine, use_pdl = job.engine, device.has_dependent_launch
    config = job.model if job.shard is None else narrow_config(job.shard)
    weights = _load_weights(job, config, device)
    report("load weights", clock.now() - started_s, f"{engine.dtype} on {device.name}")
    started_s = clock.now()
    plans = choose_plans(weights, device, is_fixed=engine.deterministic, cache=cache)
    report("choose products", clock.now() - started_s, plans.summary)
    limits = _limits_of(job)
    dtype = TORCH_DTYPES[engine.dtype]
    workspace = _make_workspace(config, weights, plans, limits, dtype, device)
    attention = _make_attention(job, config, limits, device)
    model = CudaModel(
        config,
        weights,
        make_rotary_tables(config, job.max_model_len, device.torch_device),
        workspace,
        Products(workspace, plans.choose, use_pdl=use_pdl),
        attention,
        use_pdl=use_pdl,
        ranks=_connect_ranks(job, limits, device, memory_kind),
        shard=job.shard,
    )
    stages = _connect_stages(job, limits, device, memory_kind, make_wires)
    return EngineParts(
        device=device,
        attention=attention,
        model=model,
        inputs=_make_inputs(limits, device, stages),
        limits=limits,
        shapes=_choose_shapes(engine, limits, device),
        stages=stages,
    )


def _load_weights(job: LoadJob, config: ModelConfig, device: Device) -> ModelWeights:
    """Returns once all of them are on the device; `config` is of this rank's share."""
    engine, dtype = job.engine, TORCH_DTYPES[job.engine.dtype]
    source: WeightSource
    if engine.load_format == "dummy":
        source = DeviceDummyWeights(engine.seed, device.torch_device, dtype)
    else:
        source = SafetensorsWeights(job.folder)
    weights = load_weights(config, source, dtype, device.torch_device, job.shard)
    device.synchronize()
    return weights


def _limits_of(job: LoadJob) -> InputLimits:
    engine = job.engine
    return InputLimits(
        max_rows=max(engine.max_num_batched_tokens, engine.max_num_seqs),
        max_seqs=engine.max_num_seqs,
        max_samples=max(engine.max_num_seqs, 8),
        max_blocks=-(-job.max_model_len // engine.block_size),
    )


def _make_workspace(
    config: ModelConfig,
    weights: ModelWeights,
    plans: ProductPlans,
    limits: InputLimits,
    dtype: torch.dtype,
    device: Device,
) -> Workspace:
    size = WorkspaceSize(
        max_rows=limits.max_rows,
        max_sample_rows=limits.max_samples,
        max_product_bytes=max_product_bytes(config, plans.choose, limits.max_rows, dtype),
        logits_columns=weights.head_VE.shape[0],
    )
    return Workspace(config, size, dtype, device.torch_device)


def _make_attention(
    job: LoadJob, config: ModelConfig, limits: InputLimits, device: Device
) -> AttentionRoom:
    """Allocates what the parts of a split sequence leave for one another."""
    engine, place = job.engine, device.torch_device
    split_tokens = FIXED_SPLIT_TOKENS if engine.deterministic else None
    max_splits = BALANCED_SPLITS
    if split_tokens is not None:
        max_splits = max(2, -(-job.max_model_len // split_tokens))
    heads, head_dim = config.num_heads, config.head_dim
    return AttentionRoom(
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


def _choose_shapes(
    engine: EngineConfig, limits: InputLimits, device: Device
) -> tuple[StepShape, ...]:
    """Returns those that graphs are captured of."""
    if engine.enforce_eager or not device.is_cuda:
        return ()
    return graph_shapes(engine.max_num_seqs, limits.max_rows, engine.tensor_parallel)


def _make_inputs(limits: InputLimits, device: Device, stages: Stages | None) -> StepInputs:
    if stages is None:
        return StepInputs(limits, device)
    room = stages.room
    return StepInputs(
        limits, device, num_lanes=room.num_stages, max_in_flight=room.max_steps_in_flight
    )


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
