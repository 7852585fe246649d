"""What each role of a local cluster is told, and what starts it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdserve.config.cluster import ClusterConfig
from pdserve.config.load import to_argv
from pdserve.config.router import RouterConfig
from pdserve.config.stage import StageConfig
from pdserve.config.worker import WorkerConfig
from pdserve.request import Role

RESTART_WAIT_S = 60.0
"""How long a stream waits for a worker: one that died is started again and loads its model."""
HIDDEN_FIELDS = ("redis_url", "api_keys", "cluster_secret", "stage_token")
"""Told by `environment_of`, not by flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Where the router listens."""

    grpc: int
    http: int
    metrics: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What was found out at start: where this cluster lives."""

    name: str
    """The cluster's name in the registry."""
    host: str
    port: int
    http_port: int
    metrics_port: int
    folder: Path
    """The model folder."""
    redis_url: str
    secret: str = field(repr=False)
    """Salts the caches of tenants; the same over restarts of the router."""


def worker_configs(config: ClusterConfig, site: Site) -> tuple[WorkerConfig, ...]:
    """Returns one configuration per replica, prefill first."""
    pools = (
        (Role.PREFILL, config.num_prefill, config.prefill_faults),
        (Role.DECODE, config.num_decode, config.decode_faults),
    )
    engines = {
        Role.PREFILL: config.engine,
        Role.DECODE: config.decode_engine,
    }
    return tuple(
        WorkerConfig(
            role=role,
            worker_id=f"{role}-{index}",
            engine=replace(engines[role], model=str(site.folder)),
            host=site.host,
            redis_url=site.redis_url,
            cluster=site.name,
            max_local_prefill_tokens=config.max_local_prefill_tokens,
            drain_timeout_s=config.drain_timeout_s,
            can_flip=config.can_flip,
            log_level=config.log_level,
            span_folder=config.span_folder,
            heartbeat_s=config.heartbeat_s,
            registry_lease_s=config.registry_lease_s,
            frozen_after_s=config.frozen_after_s,
            spread_stages=config.spread_stages,
            stage_token=config.stage_token,
            stage_silence_s=config.stage_silence_s,
            orphan_grace_s=config.orphan_grace_s,
            handoff=config.handoff,
            faults=faults,
        )
        for role, count, faults in pools
        for index in range(count)
    )


def router_config(config: ClusterConfig, site: Site) -> RouterConfig:
    """Returns the router's configuration."""
    return RouterConfig(
        model=str(site.folder),
        redis_url=site.redis_url,
        served_model_name=config.served_model_name or config.engine.model,
        host=site.host,
        port=site.port,
        http_port=site.http_port,
        no_http=config.no_http,
        strict_fields=config.strict_fields,
        metrics_port=site.metrics_port,
        fronts=config.fronts,
        cluster=site.name,
        block_size=config.engine.block_size,
        max_model_len=config.engine.max_model_len,
        api_keys=config.api_keys,
        api_keys_file=config.api_keys_file,
        cluster_secret=site.secret,
        local_prefill_tokens=config.local_prefill_tokens,
        profiles=config.profiles,
        slo_classes=config.slo_classes,
        max_queued=config.max_queued,
        max_in_flight=config.max_in_flight,
        worker_silence_s=config.worker_silence_s,
        pools_may_be_empty=config.can_be_empty,
        no_worker_wait_s=RESTART_WAIT_S,
        max_client_buffer_bytes=config.max_client_buffer_bytes,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
    )


def environment_of(config: WorkerConfig | RouterConfig) -> Mapping[str, str]:
    """Returns the variables of a role.

    Redis, keys and secrets are told by variable and not by flag: ps shows flags to everybody, and
    a URL may hold a password. One OpenMP thread a process: barriers between busy processes cost 50
    times.
    """
    common = {"PDSERVE_REDIS": config.redis_url, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # Empty where there is nothing to tell: a child inherits this process's own variables.
    if isinstance(config, WorkerConfig):
        return {
            **common,
            "PDSERVE_API_KEY": "",
            "PDSERVE_CLUSTER_SECRET": "",
            "PDSERVE_STAGE_TOKEN": config.stage_token or "",
        }
    return {
        **common,
        "PDSERVE_STAGE_TOKEN": "",
        "PDSERVE_API_KEY": " ".join(config.api_keys),
        "PDSERVE_CLUSTER_SECRET": config.cluster_secret or "",
    }


def worker_argv(
    worker: WorkerConfig, command_of: Callable[[str], Sequence[str]]
) -> tuple[str, ...]:
    """Returns what starts a replica; one that can flip is told its role by flag."""
    if worker.can_flip:
        return (*command_of("either-worker"), *to_argv(worker, without=HIDDEN_FIELDS))
    command = command_of(f"{worker.role}-worker")
    return (*command, *to_argv(worker, without=("role", *HIDDEN_FIELDS)))


def stage_argvs(
    worker: WorkerConfig, command_of: Callable[[str], Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Returns what holds each stage of a worker that is not where its face is."""
    if not worker.has_remote_stages:
        return ()
    configs = (
        StageConfig(
            worker_id=worker.worker_id,
            stage=stage,
            host=worker.host,
            redis_url=worker.redis_url,
            cluster=worker.cluster,
            heartbeat_s=worker.heartbeat_s,
            registry_lease_s=worker.registry_lease_s,
            log_level=worker.log_level,
        )
        for stage in range(1, worker.engine.pipeline_parallel)
    )
    return tuple((*command_of("stage"), *to_argv(c, without=HIDDEN_FIELDS)) for c in configs)


def role_command(role: str) -> tuple[str, ...]:
    """Returns what starts a role; its flags follow.

    Each role has a module of its own, so that no process imports what another role needs.

    Args:
        role: `router`, `router-group`, `brain`, `prefill-worker`, `decode-worker`, `either-worker`
            or `stage`.
    """
    return (sys.executable, "-m", f"launcher.roles.{role.replace('-', '_')}")
