"""What each replica computes with: a model, a device, and the memory and sizes of its steps."""

from dataclasses import dataclass
from typing import Annotated

import typer

from launcher.options.ranks import RankOptions
from pdserve.config.engine import DEVICE_DEFAULTS, DeviceKind, Dtype, EngineConfig, LoadFormat
from pdserve.config.load import parse_size
from pdserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """An engine but for its ranks."""

    model: Annotated[
        str,
        typer.Argument(
            envvar="PDSERVE_MODEL",
            help="An alias (smollm2-135m), a .gguf file, a model folder or a hub id (org/name).",
        ),
    ]
    device: Annotated[DeviceKind, typer.Option(help="cuda: one GPU a rank.")] = "cpu"
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="float32 is deterministic, and the default on cpu.", show_default=False),
    ] = None
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy: random weights from config.json.")
    ] = "auto"
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, a power of two.")] = 16
    max_model_len: Annotated[int | None, typer.Option(help="Prompt plus output, in tokens.")] = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences in one step: 64, or 256 on cuda.", show_default=False),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens in one step: 256, or 8192 on cuda.", show_default=False),
    ] = None
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Bytes of KV per rank, e.g. 512M or 2G.")
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that a replica may take.")
    ] = 0.9
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On cuda: results independent of the batch.")
    ] = False
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="On cuda: no CUDA graphs.")
    ] = False
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse KV of shared prefixes.")] = True
    seed: Annotated[int, typer.Option(help="Of dummy weights.")] = 0

    def config(self, ranks: RankOptions) -> EngineConfig:
        """Returns the engine of prefill replicas; what is not given is the device's default.

        Raises:
            ConfigError: a value is out of range.
        """
        defaults = DEVICE_DEFAULTS[self.device]
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        return EngineConfig(
            model=self.model,
            load_format=self.load_format,
            device=self.device,
            dtype=self.dtype or defaults.dtype,
            max_num_seqs=defaults.max_num_seqs if num_seqs is None else num_seqs,
            max_num_batched_tokens=(
                defaults.max_num_batched_tokens if num_tokens is None else num_tokens
            ),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            kv_cache_memory_bytes=read_bytes(self.kv_cache_memory, "--kv-cache-memory"),
            gpu_memory_utilization=self.gpu_memory_utilization,
            deterministic=self.deterministic,
            enforce_eager=self.enforce_eager,
            enable_prefix_caching=self.enable_prefix_caching,
            tensor_parallel=ranks.tensor_parallel_size,
            pipeline_parallel=ranks.pipeline_parallel_size,
            seed=self.seed,
        )


def read_bytes(text: str | None, flag: str) -> int | None:
    """Reads a size such as 512M; None of None.

    Raises:
        ConfigError: it is none; the text names the flag.
    """
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be {error}, got {text[:64]!r}") from None
