"""Loads what a rank computes with: its part of the model, and memory for the KV of that part."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.cache.kv_tensors import TORCH_DTYPES, KvTensors
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.layers.parallel import Shard
from pdserve.models.folder import (
    effective_engine,
    effective_max_model_len,
    geometry_of,
    read_model_config,
)
from pdserve.models.llama import LlamaModel
from pdserve.models.registry import load_model
from pdserve.rank.gloo_groups import connect_stages, connect_tensor_group
from pdserve.request import Incarnation
from pdserve.rpc.channel import BlockingChannel
from pdserve.timeline import Clock

DEFAULT_KV_BYTES = 512 * 1024 * 1024

ReportPhase = Callable[[str, float, str], None]
"""Takes a phase that ended: its name, its seconds, and a detail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankArguments:
    """What the face tells a rank beside its configuration."""

    incarnation: Incarnation
    rank: int
    group_folder: Path
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
    model: LlamaModel
    kv: KvTensors
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
    started_s = clock.now()
    folder = Path(config.engine.model)
    model_config = read_model_config(folder)
    config = replace(config, engine=effective_engine(model_config, config.engine))
    max_model_len = effective_max_model_len(model_config, config.engine.max_model_len)
    geometry = geometry_of(model_config, config.engine)
    shard = None
    if geometry.num_ranks > 1:
        shard = _make_shard(model_config, geometry, arguments, config.host)
    model = load_model(folder, config.engine, shard)
    report("load weights", clock.now() - started_s, config.engine.dtype)
    started_s = clock.now()
    num_blocks = _num_blocks(config, geometry)
    kv = KvTensors(geometry, num_blocks, geometry.parts[arguments.rank])
    room = num_blocks * geometry.block_size
    report("allocate KV", clock.now() - started_s, f"{room} tokens in {num_blocks} blocks")
    return LoadedRank(
        worker=config,
        config=model_config,
        geometry=geometry,
        model=model,
        kv=kv,
        max_model_len=min(max_model_len, room),
    )


def _make_shard(
    config: ModelConfig, geometry: KvGeometry, arguments: RankArguments, host: str
) -> Shard:
    part = geometry.parts[arguments.rank]
    tensor, stages = geometry.tensor_parallel, geometry.pipeline_parallel
    folder, dtype = arguments.group_folder, TORCH_DTYPES[geometry.dtype]
    return Shard(
        whole=config,
        part=part,
        tensor_parallel=tensor,
        num_stages=stages,
        is_exact=geometry.dtype == "float32",
        group=connect_tensor_group(folder, part, tensor, host),
        stages=connect_stages(folder, part, tensor, stages, dtype, host),
    )


def _num_blocks(config: WorkerConfig, geometry: KvGeometry) -> int:
    """Returns how many blocks fit on the rank that holds most of each; all ranks have as many."""
    kv_bytes = config.engine.kv_cache_memory_bytes or DEFAULT_KV_BYTES
    block_bytes = max(geometry.bytes_per_block_on(part) for part in geometry.parts)
    num_blocks = kv_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory must be at least {2 * block_bytes} bytes (two KV blocks), "
            f"got {kv_bytes}"
        )
    return num_blocks
