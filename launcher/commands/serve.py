"""`pdserve serve`: a whole cluster on this machine, until it is told to stop."""

import secrets
import sys
from dataclasses import replace
from typing import Annotated, Literal

import typer

from autoscaler.settings import PoolRange, ScalingSettings, parse_range
from launcher.control import control_folder
from launcher.local_pool import LocalCluster
from launcher.place import Place
from launcher.ray_pool import RayConfig, RayPlace, check_reach
from launcher.run_cluster import run_until_signal, write_line
from launcher.scaled_cluster import autoscale_launched
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import (
    DEVICE_DEFAULTS,
    DeviceKind,
    Dtype,
    EngineConfig,
    LoadFormat,
)
from pdserve.config.load import from_pairs, parse_size, read_runtime_folder
from pdserve.config.log_level import LogLevel
from pdserve.config.worker import TRANSPORTS, FaultConfig, HandoffConfig
from pdserve.errors import ConfigError
from pdserve.request import Role
from pdserve.rpc.stage_handshake import check_token


def serve(
    model: Annotated[
        str,
        typer.Argument(
            envvar="PDSERVE_MODEL",
            help="An alias (smollm2-135m), a .gguf file, a model folder or a hub id (org/name).",
        ),
    ],
    prefill: Annotated[
        str,
        typer.Option(
            metavar="N|MIN..MAX", help="Prefill replicas; 0 lets decode replicas prefill."
        ),
    ] = "1",
    decode: Annotated[str, typer.Option(metavar="N|MIN..MAX", help="Decode replicas.")] = "1",
    max_replicas: Annotated[
        int | None, typer.Option(help="Of both pools together, where they share GPUs.")
    ] = None,
    flips: Annotated[
        bool,
        typer.Option(
            "--flips/--no-flips",
            help="Replicas of one rank may change their pool with their weights loaded.",
        ),
    ] = True,
    ttft_target_s: Annotated[
        float, typer.Option(help="What pools of MIN..MAX are sized for.")
    ] = 1.0,
    tpot_target_s: Annotated[float, typer.Option(help="Likewise, per output token.")] = 0.1,
    host: Annotated[str, typer.Option(help="The one address every listener binds.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The router's gRPC port; 0: a free one."),
    ] = 50051,
    http_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The router's OpenAI-compatible port; 0: a free one."),
    ] = 8000,
    no_http: Annotated[bool, typer.Option("--no-http", help="Listen for gRPC alone.")] = False,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="The router's /metrics port; 0: a free one.",
        ),
    ] = 0,
    redis: Annotated[
        str | None,
        typer.Option(help="redis://...; without it a private one starts."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Name in Redis; made up by default."),
    ] = None,
    device: Annotated[DeviceKind, typer.Option(help="cuda: one GPU a rank.")] = "cpu",
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="float32 is deterministic, and the default on cpu.", show_default=False),
    ] = None,
    load_format: Annotated[
        LoadFormat,
        typer.Option(help="dummy: random weights from config.json."),
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, a power of two.")] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Prompt plus output, in tokens."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences in one step: 64, or 256 on cuda.", show_default=False),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens in one step: 256, or 8192 on cuda.", show_default=False),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Bytes of KV per rank, e.g. 512M or 2G."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that a replica may take.")
    ] = 0.9,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="On cuda: results independent of the batch."),
    ] = False,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="On cuda: no CUDA graphs.")
    ] = False,
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share each layer."),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option("--pipeline-parallel-size", "-pp", help="Stages that share the layers."),
    ] = 1,
    decode_tensor_parallel_size: Annotated[
        int | None,
        typer.Option(help="Of decode replicas, if it differs."),
    ] = None,
    decode_pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(help="Of decode replicas, if it differs."),
    ] = None,
    spread_stages: Annotated[
        bool,
        typer.Option(
            "--spread-stages",
            help="Stages on nodes of their own: Ray's, or where pdserve stage runs.",
        ),
    ] = False,
    stage_token: Annotated[
        str | None,
        typer.Option(
            show_envvar=True, help="The same here and for pdserve stage. The variable hides it."
        ),
    ] = None,
    transports: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="What KV may travel over, the preferred first.",
            show_default=",".join(TRANSPORTS),
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(help="Reuse KV of shared prefixes."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of dummy weights.")] = 0,
    max_local_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens a decode replica may compute for a request.",
        ),
    ] = None,
    local_prefill_tokens: Annotated[
        int,
        typer.Option(
            help="Let a decode replica prefill what is at most this much uncached there.",
        ),
    ] = 0,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The name clients use."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TENANT=]KEY",
            show_envvar=True,
            help="Ask all clients for a key; may be repeated. A file hides it from ps.",
        ),
    ] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(help="File with lines of TENANT KEY.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="What steps take on this device; may be repeated. Else learned."
        ),
    ] = None,
    slo_class: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ttft_s:S,tpot_s:S,priority:N",
            help="What requests of a class want; may be repeated.",
        ),
    ] = None,
    ready_timeout_s: Annotated[float, typer.Option(help="Limit of the start.")] = 120.0,
    drain_timeout_s: Annotated[
        float,
        typer.Option(help="For running requests at the end."),
    ] = 60.0,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="Of the children; by default warning on a terminal and info otherwise.",
        ),
    ] = None,
    launcher: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where replicas run: as child processes, or as Ray actors."),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(help="A running Ray cluster; without it one starts on loopback."),
    ] = None,
    ray_dashboard: Annotated[
        bool,
        typer.Option("--ray-dashboard", help="With Ray's dashboard, on loopback."),
    ] = False,
    ray_nodes: Annotated[
        Literal["here", "any"],
        typer.Option(
            help="Where replicas may be: on this machine, or on any node, listening on its address."
        ),
    ] = "here",
    ray_pools: Annotated[
        bool,
        typer.Option(
            "--ray-pools",
            help="Replicas only where Ray's resource pdserve_prefill or pdserve_decode is.",
        ),
    ] = False,
    handoff: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", hidden=True, help="Of HandoffConfig.")
    ] = None,
    scaling: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", hidden=True, help="Of ScalingSettings."),
    ] = None,
    span_folder: Annotated[
        str | None,
        typer.Option(hidden=True, help="Where ranks write down the stages of each request."),
    ] = None,
    prefill_fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", hidden=True, help="Of FaultConfig.")
    ] = None,
    decode_fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", hidden=True, help="Of FaultConfig.")
    ] = None,
) -> int:
    """Serve MODEL: start Redis, both pools and a router, and print where they listen.

    SIGTERM or Ctrl-C drains; a second one stops now.
    """
    defaults = DEVICE_DEFAULTS[device]
    engine = EngineConfig(
        model=model,
        load_format=load_format,
        device=device,
        dtype=dtype or defaults.dtype,
        max_num_seqs=defaults.max_num_seqs if max_num_seqs is None else max_num_seqs,
        max_num_batched_tokens=(
            defaults.max_num_batched_tokens
            if max_num_batched_tokens is None
            else max_num_batched_tokens
        ),
        block_size=block_size,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=_size(kv_cache_memory, "--kv-cache-memory"),
        gpu_memory_utilization=gpu_memory_utilization,
        deterministic=deterministic,
        enforce_eager=enforce_eager,
        enable_prefix_caching=enable_prefix_caching,
        tensor_parallel=tensor_parallel_size,
        pipeline_parallel=pipeline_parallel_size,
        seed=seed,
    )
    settings = replace(
        from_pairs(ScalingSettings, scaling or (), "--scaling"),
        prefill=_range(prefill, "--prefill", 0),
        decode=_range(decode, "--decode", 1),
        most_in_all=max_replicas,
        ttft_s=ttft_target_s,
        tpot_s=tpot_target_s,
    )
    can_flip = (
        flips
        and launcher == "local"
        and settings.prefill.most > 0
        and not (settings.prefill.is_fixed and settings.decode.is_fixed)
        and {engine.num_ranks, decode_tensor_parallel_size or 1} == {1}
        and (decode_pipeline_parallel_size or 1) == 1
    )
    config = ClusterConfig(
        engine=engine,
        can_flip=can_flip,
        num_prefill=first_size(settings.prefill),
        num_decode=first_size(settings.decode),
        can_be_empty=settings.can_be_empty,
        host=host,
        port=port,
        http_port=http_port,
        no_http=no_http,
        metrics_port=metrics_port,
        redis_url=redis,
        served_model_name=served_model_name,
        decode_tensor_parallel=decode_tensor_parallel_size,
        decode_pipeline_parallel=decode_pipeline_parallel_size,
        spread_stages=spread_stages,
        stage_token=stage_token,
        max_local_prefill_tokens=max_local_prefill_tokens,
        api_keys=tuple(api_key or ()),
        api_keys_file=api_keys_file,
        profiles=tuple(profile or ()),
        slo_classes=tuple(slo_class or ()),
        local_prefill_tokens=local_prefill_tokens,
        ready_timeout_s=ready_timeout_s,
        drain_timeout_s=drain_timeout_s,
        log_level=log_level or default_log_level(),
        span_folder=span_folder,
        handoff=_order_transports(
            from_pairs(HandoffConfig, handoff or (), "--handoff"), transports
        ),
        prefill_faults=from_pairs(FaultConfig, prefill_fault or (), "--prefill-fault"),
        decode_faults=from_pairs(FaultConfig, decode_fault or (), "--decode-fault"),
    )
    place: Place | None = None
    if launcher == "ray":
        engines = {Role.PREFILL: config.engine, Role.DECODE: config.decode_engine}
        ray = RayConfig(
            address=ray_address,
            has_dashboard=ray_dashboard,
            is_anywhere=ray_nodes == "any",
            has_pools=ray_pools,
        )
        check_reach(config, ray)
        place = RayPlace(ray, report=write_line, engines=engines)
        if config.stage_token is None:
            config = replace(config, stage_token=secrets.token_hex(32))
    elif ray_address is not None or ray_dashboard or ray_nodes == "any" or ray_pools:
        raise ConfigError(
            "--ray-address, --ray-dashboard, --ray-pools and --ray-nodes need --launcher ray"
        )
    elif config.spread_stages:
        check_token(config.stage_token)
    launched = LocalCluster(config, cluster=cluster, report=write_line, place=place)
    scaled = autoscale_launched(
        launched,
        config,
        replace(settings, flips_in_place=can_flip),
        report=write_line,
        control_folder=control_folder(read_runtime_folder()),
    )
    return run_until_signal(launched, scaled)


def first_size(bounds: PoolRange) -> int:
    """Returns how many replicas a pool starts with: one at least, so that the start proves all."""
    return max(bounds.least, min(1, bounds.most))


def default_log_level() -> LogLevel:
    """Returns how much children log: on a terminal no more than what somebody must see."""
    return "warning" if sys.stderr.isatty() else "info"


def _range(text: str, flag: str, fewest: int) -> PoolRange:
    if text.startswith("-"):
        raise ConfigError(f"{flag} must be at least {fewest}, got {text}")
    try:
        bounds = parse_range(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if bounds.most < fewest:
        raise ConfigError(f"{flag} must be at least {fewest}, got {text}")
    return bounds


def _order_transports(handoff: HandoffConfig, text: str | None) -> HandoffConfig:
    if text is None:
        return handoff
    try:
        return replace(handoff, transports=tuple(text.replace(",", " ").split()))
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error


def _size(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be {error}, got {text[:64]!r}") from None
