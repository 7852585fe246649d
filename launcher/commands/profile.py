"""`pdserve profile`: measures a model on this device, for `pdserve plan` and the router."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from launcher.model_source import resolve_model
from pdserve.config.engine import DEVICE_DEFAULTS, DeviceKind, Dtype, EngineConfig, LoadFormat
from pdserve.config.load import parse_size
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

LINK_BYTES_PER_S: dict[DeviceKind, float] = {"cpu": 1.2e9, "cuda": 50e9}
"""Gloo on loopback; one port of 400 Gbit/s a GPU."""


def profile(
    model: Annotated[str, typer.Argument(help="An alias, GGUF file, folder or hub id.")],
    output: Annotated[Path, typer.Option(help="Where the profile goes (JSON).")],
    name: Annotated[
        str | None, typer.Option(help="The model's name in the profile; its folder's by default.")
    ] = None,
    device: Annotated[DeviceKind, typer.Option(help="What computes.")] = "cpu",
    dtype: Annotated[Dtype | None, typer.Option(help="float32 on cpu.", show_default=False)] = None,
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy: random weights from config.json.")
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, a power of two.")] = 16,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in one step.", show_default=False)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step.", show_default=False)
    ] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Bytes of KV, e.g. 512M.")] = None,
    link_bytes_per_s: Annotated[
        float | None,
        typer.Option(help="Of a hand-off; is written down, not measured.", show_default=False),
    ] = None,
) -> int:
    """Measures a model's steps on this device and writes a profile."""
    defaults = DEVICE_DEFAULTS[device]
    folder = resolve_model(model, needs_weights=load_format != "dummy")
    engine = EngineConfig(
        model=str(folder),
        load_format=load_format,
        device=device,
        dtype=dtype or defaults.dtype,
        block_size=block_size,
        max_num_seqs=max_num_seqs or defaults.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or defaults.max_num_batched_tokens,
        kv_cache_memory_bytes=None if kv_cache_memory is None else parse_size(kv_cache_memory),
    )
    worker = WorkerConfig(role=Role.DECODE, worker_id="profile", engine=engine, redis_url="")
    order = {
        "worker": asdict(worker),
        "model": name or Path(model).stem,
        "link_bytes_per_s": link_bytes_per_s or LINK_BYTES_PER_S[device],
    }
    # The launcher itself never imports torch.
    child = subprocess.run(
        [sys.executable, "-m", "launcher.measure_profile"],
        input=json.dumps(order),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode:
        raise ConfigError(f"{model} could not be measured (status {child.returncode})")
    output.write_text(child.stdout, encoding="utf-8")
    return 0
