"""`pdserve profile`: measures a model on this device, for `pdserve plan` and the router."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from launcher.model_source import resolve_model
from launcher.options.engine import read_bytes
from launcher.options.number import count, number
from launcher.output_file import check_writable, write_output
from pdserve.config.engine import DEVICE_DEFAULTS, DeviceKind, Dtype, EngineConfig, LoadFormat
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

LINK_BYTES_PER_S: dict[DeviceKind, float] = {"cpu": 1.2e9, "cuda": 50e9}
"""Gloo on loopback; one port of 400 Gbit/s a GPU."""
LEAST_LINK_BYTES_PER_S = 1e3
MOST_LINK_BYTES_PER_S = 1e14
MOST_OF_A_STEP = 2**20
"""Sequences, and tokens."""


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
    block_size: Annotated[
        int, count("--block-size", "Tokens per KV block, a power of two.", 1, 128)
    ] = 16,
    max_num_seqs: Annotated[
        int | None,
        count("--max-num-seqs", "Sequences in one step.", 1, MOST_OF_A_STEP, show_default=False),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        count(
            "--max-num-batched-tokens",
            "Tokens in one step.",
            1,
            MOST_OF_A_STEP,
            show_default=False,
        ),
    ] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Bytes of KV, e.g. 512M.")] = None,
    link_bytes_per_s: Annotated[
        float | None,
        number(
            "--link-bytes-per-s",
            "Of a hand-off; is written down, not measured.",
            LEAST_LINK_BYTES_PER_S,
            MOST_LINK_BYTES_PER_S,
            show_default=False,
        ),
    ] = None,
) -> int:
    """Measures a model's steps on this device and writes a profile."""
    check_writable("--output", output)
    defaults = DEVICE_DEFAULTS[device]
    engine = EngineConfig(
        model=model,
        load_format=load_format,
        device=device,
        dtype=dtype or defaults.dtype,
        block_size=block_size,
        # None of them can be 0.
        max_num_seqs=max_num_seqs or defaults.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or defaults.max_num_batched_tokens,
        kv_cache_memory_bytes=read_bytes(kv_cache_memory, "--kv-cache-memory"),
    )
    # All that was typed is in range: only now may a model be fetched or converted.
    folder = resolve_model(model, needs_weights=load_format != "dummy")
    engine = replace(engine, model=str(folder))
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
        reason = child.stdout.strip() or f"status {child.returncode}"
        raise ConfigError(f"{model} could not be measured: {reason}")
    write_output("--output", output, child.stdout)
    return 0
