"""Loads what a rank computes with: its part of the model, and memory for the KV of that part."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.cache.kv_marks import KvMarks
from pdserve.cache.kv_tensors import TORCH_DTYPES, KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.config.link_memory import link_memory_bytes, settle_frames
from pdserve.config.load import cache_folder
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.worker import WorkerConfig
from pdserve.layers.parallel import Shard
from pdserve.models.folder import (
    effective_engine,
    effective_max_model_len,
    geometry_of,
    read_model_config,
)
from pdserve.rank.backend import (
    Announce,
    Backend,
    LoadJob,
    RankRunner,
    ReportPhase,
    StepResults,
)
from pdserve.rank.cpu_backend import CpuBackend
from pdserve.rank.exchange import RankExchange
from pdserve.rank.gloo_groups import connect_stages, connect_tensor_group
from pdserve.rank.meeting import Meeting
from pdserve.request import Incarnation, Role
from pdserve.rpc.channel import BlockingChannel
from pdserve.timeline import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class RankArguments:
    """What the face tells a rank beside its configuration."""

    incarnation: Incarnation
    rank: int
    meeting: Meeting
    """Where the ranks of a replica find each other."""
    rank_channels: tuple[BlockingChannel, ...]
    """On rank 0 to each other rank, on these to rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRank:
    """A rank's part of the model and its memory."""

    worker: WorkerConfig
    """As far as the model allows what was wished for."""
    config: ModelConfig
    geometry: KvGeometry
    kv: KvTensors
    make_runner: Callable[[Announce | None, StepResults | None], RankRunner]
    marks: KvMarks | None
    """In the runner's steps."""
    max_model_len: int
    """What both the model and the memory allow."""


def load_rank(
    config: WorkerConfig, arguments: RankArguments, clock: Clock, report: ReportPhase
) -> LoadedRank:
    """Meets the other ranks, loads and allocates.

    Raises:
        ConfigError: something the user can mend: so many ranks cannot share the model, the folder
            lacks something, or the memory is too small.
    """
    folder = Path(config.engine.model)
    model_config = read_model_config(folder)
    config = replace(config, engine=effective_engine(model_config, config.engine))
    max_model_len = effective_max_model_len(model_config, config.engine.max_model_len)
    geometry = geometry_of(model_config, config.engine)
    shard, exchange = None, None
    if geometry.num_ranks > 1 and config.engine.device == "cuda":
        store = arguments.meeting.store("exchange", geometry.num_ranks)
        exchange = RankExchange(store, arguments.rank, geometry.num_ranks)
        shard = make_device_shard(model_config, geometry, arguments.rank)
    elif geometry.num_ranks > 1:
        shard = _make_shard(model_config, geometry, arguments, config.host)
    job = LoadJob(
        folder=folder,
        engine=config.engine,
        model=model_config,
        geometry=geometry,
        part=geometry.parts[arguments.rank],
        shard=shard,
        max_model_len=max_model_len,
        link_bytes=max(
            link_memory_bytes(config.handoff, geometry, arguments.rank, role)
            for role in config.roles
        ),
        mark_layers=_choose_mark_layers(config, geometry),
        exchange=exchange,
    )
    parts = choose_backend(config.engine).load(job, clock, report)
    return LoadedRank(
        worker=config,
        config=model_config,
        geometry=geometry,
        kv=parts.kv,
        make_runner=parts.make_runner,
        marks=parts.marks,
        max_model_len=min(max_model_len, parts.kv.num_blocks * geometry.block_size),
    )


def _choose_mark_layers(config: WorkerConfig, geometry: KvGeometry) -> int | None:
    """Returns how many layers apart steps are marked: for frames as a worker alike would want."""
    if config.engine.device == "cpu" or Role.PREFILL not in config.roles:
        return None
    layered = settle_frames(config.handoff, geometry, is_on_gpu=True).layered
    return geometry.num_layers if layered is None else layered.layers


def choose_backend(engine: EngineConfig) -> Backend:
    """Returns what computes on the device that the user chose."""
    if engine.device == "cpu":
        return CpuBackend()
    # Imported here: it needs Triton, which only machines with a GPU must have.
    from pdserve.cuda.backend import CudaBackend

    return CudaBackend(cache_folder() / "products")


def make_device_shard(config: ModelConfig, geometry: KvGeometry, rank: int) -> Shard:
    """Returns a rank's part where sums go from device to device: partial products are added."""
    return Shard(
        whole=config,
        part=geometry.parts[rank],
        tensor_parallel=geometry.tensor_parallel,
        num_stages=geometry.pipeline_parallel,
        is_exact=False,
    )


def _make_shard(
    config: ModelConfig, geometry: KvGeometry, arguments: RankArguments, host: str
) -> Shard:
    part = geometry.parts[arguments.rank]
    tensor, stages = geometry.tensor_parallel, geometry.pipeline_parallel
    meeting, dtype = arguments.meeting, TORCH_DTYPES[geometry.dtype]
    return Shard(
        whole=config,
        part=part,
        tensor_parallel=tensor,
        num_stages=stages,
        is_exact=geometry.dtype == "float32",
        group=connect_tensor_group(meeting, part, tensor, host),
        stages=connect_stages(meeting, part, tensor, stages, dtype, host),
    )
