"""Settings of one engine (a rank's model, cache and scheduler)."""

from dataclasses import dataclass
from typing import Literal

from pdserve.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceDefaults:
    """Settings of `EngineConfig` whose defaults depend on the device."""

    dtype: Dtype
    max_num_seqs: int
    max_num_batched_tokens: int


DEVICE_DEFAULTS: dict[DeviceKind, DeviceDefaults] = {
    "cpu": DeviceDefaults(dtype="float32", max_num_seqs=64, max_num_batched_tokens=256),
    "cuda": DeviceDefaults(dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=8192),
}
"""Whoever reads settings from a user fills these in; the fields' own defaults are the CPU's."""

ATTENTION_TILE_TOKENS = 64
"""Queries are computed in tiles of this many positions, whatever the chunk borders are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine computes and how much it may hold."""

    model: str
    """An alias, a GGUF file, a model folder or a hub id."""
    load_format: LoadFormat = "auto"
    """`dummy` makes random weights from config.json alone."""
    device: DeviceKind = "cpu"
    """What computes: this machine's processor, or one CUDA GPU a rank."""
    dtype: Dtype = "float32"
    """float32 is bit-equal whatever the batch; bfloat16 is faster and promises no such thing.
    On `cuda` bfloat16 is the default."""
    block_size: int = 16
    """Tokens per KV block, a power of two from 1 to 128."""
    max_model_len: int | None = None
    """Prompt plus output, in tokens; None takes the model's own limit."""
    max_num_seqs: int = 64
    """Sequences in one step; 256 by default on `cuda`."""
    max_num_batched_tokens: int = 256
    """Tokens computed in one step; 8192 by default on `cuda`."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for KV blocks on one rank; None takes 512 MiB, or on `cuda` what is left of the
    utilization below."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that this process may take, in (0, 1]."""
    deterministic: bool = False
    """On `cuda`: a sequence's results do not depend on what else is in the batch. Costs speed.
    On `cpu` float32 is always so."""
    enforce_eager: bool = False
    """On `cuda`: no CUDA graphs; starts faster and computes slower."""
    enable_prefix_caching: bool = True
    tensor_parallel: int = 1
    """Ranks that share each layer: a divisor of the KV heads, or a multiple that divides heads."""
    pipeline_parallel: int = 1
    """Stages that share the layers."""
    seed: int = 0
    """Seed of dummy weights."""

    @property
    def num_ranks(self) -> int:
        """Of a replica."""
        return self.tensor_parallel * self.pipeline_parallel

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
            ConfigError: a value is out of range; the text names it and its limit.
        """
        size = self.block_size
        if size < 1 or size > 128 or size & (size - 1):
            raise ConfigError(
                f"block_size must be a power of two from 1 to 128, got {size}",
                settings=("block_size",),
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}",
                settings=("gpu_memory_utilization",),
            )
        for name, value in (
            ("tensor_parallel", self.tensor_parallel),
            ("pipeline_parallel", self.pipeline_parallel),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("kv_cache_memory_bytes", self.kv_cache_memory_bytes),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", settings=(name,))
