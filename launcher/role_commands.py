"""What each role of a local cluster is told, and what starts it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.config.cluster import ClusterConfig
from pdserve.config.router import RouterConfig
from pdserve.config.worker import WorkerConfig
from pdserve.request import Role

HIDDEN_FIELDS = ("redis_url",)
"""Told by `environment_of`, not by flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What was found out at start: where this cluster lives."""

    name: str
    """The cluster's name in the registry."""
    host: str
    port: int
    metrics_port: int
    folder: Path
    """The model folder."""
    redis_url: str


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
            heartbeat_s=config.heartbeat_s,
            registry_lease_s=config.registry_lease_s,
            frozen_after_s=config.frozen_after_s,
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
        metrics_port=site.metrics_port,
        cluster=site.name,
        block_size=config.engine.block_size,
        max_model_len=config.engine.max_model_len,
        worker_silence_s=config.worker_silence_s,
        drain_timeout_s=config.drain_timeout_s,
    )


def environment_of(config: WorkerConfig | RouterConfig) -> Mapping[str, str]:
    """Returns the variables of a role.

    Redis is told by variable and not by flag: a URL may hold a password, and ps shows flags to
    everybody. One OpenMP thread a process: barriers between busy processes cost 50 times.
    """
    return {"PDSERVE_REDIS": config.redis_url, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def role_command(role: str) -> tuple[str, ...]:
    """Returns what starts a role; its flags follow.

    Each role has a module of its own, so that no process imports what another role needs.

    Args:
        role: `router`, `prefill-worker` or `decode-worker`.
    """
    return (sys.executable, "-m", f"launcher.roles.{role.replace('-', '_')}")
