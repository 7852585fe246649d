"""`pdserve serve`: a whole cluster on this machine, until it is told to stop."""

import secrets
from dataclasses import replace

from autoscaler.settings import ScalingSettings
from launcher.control import control_folder
from launcher.local_pool import LocalCluster
from launcher.options.clients import ClientOptions
from launcher.options.engine import EngineOptions
from launcher.options.group import with_options
from launcher.options.handoff import HandoffOptions
from launcher.options.life import LifeOptions, default_log_level
from launcher.options.listeners import ListenerOptions
from launcher.options.membership import MembershipOptions
from launcher.options.place import PlaceOptions, check_reach
from launcher.options.pools import PoolOptions, first_size, is_sized
from launcher.options.ranks import RankOptions
from launcher.place import Place
from launcher.ray_pool import RayPlace
from launcher.run_cluster import run_until_signal, write_line
from launcher.scaled_cluster import autoscale_launched
from pdserve.config.cluster import ClusterConfig
from pdserve.config.load import read_runtime_folder
from pdserve.request import Role
from pdserve.rpc.stage_handshake import check_token
from router.slo import parse_slo_classes


@with_options
def serve(
    pools: PoolOptions,
    listeners: ListenerOptions,
    membership: MembershipOptions,
    engine: EngineOptions,
    ranks: RankOptions,
    handoff: HandoffOptions,
    clients: ClientOptions,
    life: LifeOptions,
    place: PlaceOptions,
) -> int:
    """Serve MODEL: start Redis, both pools and a router, and print where they listen.

    SIGTERM or Ctrl-C drains; a second one stops now.
    """
    settings = pools.settings()
    config = _make_config(settings, listeners, membership, engine, ranks, handoff, clients, life)
    # What only the router reads is told before anything starts.
    parse_slo_classes(config.slo_classes)
    can_flip = pools.can_flip(settings, place.flip_obstacle or config.flip_obstacle)
    # In pools of fixed sizes only on somebody's order.
    settings = replace(settings, flips_in_place=can_flip and is_sized(settings))
    config, where = _choose_place(replace(config, can_flip=can_flip), place)
    launched = LocalCluster(config, cluster=membership.cluster, report=write_line, place=where)
    scaled = autoscale_launched(
        launched,
        config,
        settings,
        report=write_line,
        control_folder=control_folder(read_runtime_folder()),
    )
    return run_until_signal(launched, scaled)


def _make_config(
    settings: ScalingSettings,
    listeners: ListenerOptions,
    membership: MembershipOptions,
    engine: EngineOptions,
    ranks: RankOptions,
    handoff: HandoffOptions,
    clients: ClientOptions,
    life: LifeOptions,
) -> ClusterConfig:
    return ClusterConfig(
        engine=engine.config(ranks),
        num_prefill=first_size(settings.prefill),
        num_decode=first_size(settings.decode),
        can_be_empty=settings.can_be_empty,
        host=listeners.host,
        port=listeners.port,
        http_port=listeners.http_port,
        no_http=listeners.no_http,
        strict_fields=clients.strict_fields,
        metrics_port=listeners.metrics_port,
        fronts=listeners.fronts,
        redis_url=membership.redis,
        served_model_name=clients.served_model_name,
        decode_tensor_parallel=ranks.decode_tensor_parallel_size,
        decode_pipeline_parallel=ranks.decode_pipeline_parallel_size,
        spread_stages=ranks.spread_stages,
        stage_token=ranks.stage_token,
        max_local_prefill_tokens=handoff.max_local_prefill_tokens,
        api_keys=tuple(clients.api_key or ()),
        api_keys_file=clients.api_keys_file,
        profiles=tuple(clients.profile or ()),
        slo_classes=tuple(clients.slo_class or ()),
        max_queued=clients.max_queued,
        max_in_flight=clients.max_in_flight,
        local_prefill_tokens=handoff.local_prefill_tokens,
        ready_timeout_s=life.ready_timeout_s,
        drain_timeout_s=life.drain_timeout_s,
        log_level=life.log_level or default_log_level(),
        span_folder=life.span_folder,
        handoff=handoff.config(),
        prefill_faults=handoff.prefill_faults(),
        decode_faults=handoff.decode_faults(),
    )


def _choose_place(config: ClusterConfig, place: PlaceOptions) -> tuple[ClusterConfig, Place | None]:
    """Returns where replicas run, None for child processes, and a token for stages under Ray."""
    ray = place.ray()
    if ray is None:
        if config.spread_stages:
            check_token(config.stage_token)
        return config, None
    check_reach(config, ray)
    engines = {Role.PREFILL: config.engine, Role.DECODE: config.decode_engine}
    where = RayPlace(ray, report=write_line, engines=engines)
    if config.stage_token is None:
        config = replace(config, stage_token=secrets.token_hex(32))
    return config, where
