"""`pdserve autoscale`: sizes pools that Kubernetes runs, from a pod beside them."""

import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from autoscaler.settings import ScalingSettings
from launcher.control import control_folder
from launcher.kubernetes_api import (
    IN_CLUSTER_URL,
    SERVICE_ACCOUNT,
    KubernetesApi,
    KubernetesConfig,
    read_namespace,
)
from launcher.kubernetes_pools import KubernetesPools, PoolObject, parse_pool_object
from launcher.options.pools import SCALING_FLAGS, read_size
from launcher.pool_figures import read_key
from launcher.run_cluster import write_line
from launcher.scaled_cluster import Autoscaling
from pdserve.config.load import from_pairs, read_runtime_folder, renaming
from pdserve.errors import ConfigError
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Role


def autoscale(
    prefill: Annotated[str, typer.Option(metavar="N|MIN..MAX", help="Prefill replicas.")],
    decode: Annotated[str, typer.Option(metavar="N|MIN..MAX", help="Decode replicas.")],
    redis: Annotated[str, typer.Option(show_envvar=True, help="As of the workers.")],
    cluster: Annotated[str, typer.Option(help="Name in Redis, as of the workers.")] = "default",
    prefill_pool: Annotated[
        str, typer.Option(metavar="KIND/NAME", help="statefulset/NAME or deployment/NAME.")
    ] = "statefulset/pdserve-prefill",
    decode_pool: Annotated[
        str, typer.Option(metavar="KIND/NAME", help="Likewise.")
    ] = "statefulset/pdserve-decode",
    router_selector: Annotated[
        str, typer.Option(help="Labels of the routers' pods.")
    ] = "app.kubernetes.io/part-of=pdserve,app.kubernetes.io/component=router",
    router_port: Annotated[int, typer.Option(min=1, max=65535, help="Of their gRPC.")] = 50051,
    namespace: Annotated[
        str | None, typer.Option(help="Of all of them; by default that of this pod.")
    ] = None,
    api_url: Annotated[str, typer.Option(help="The API server.")] = IN_CLUSTER_URL,
    token_file: Annotated[Path, typer.Option(help="Read anew for each call.")] = (
        SERVICE_ACCOUNT / "token"
    ),
    ca_file: Annotated[Path, typer.Option(help="Of the API server.")] = SERVICE_ACCOUNT / "ca.crt",
    max_replicas: Annotated[int | None, typer.Option(help="Of both pools together.")] = None,
    ttft_target_s: Annotated[float, typer.Option(help="What pools are sized for.")] = 1.0,
    tpot_target_s: Annotated[float, typer.Option(help="Likewise, per output token.")] = 0.1,
    api_keys_file: Annotated[
        str | None, typer.Option(help="As of the routers: the first key is shown to them.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What steps take; may be repeated. Else learned."),
    ] = None,
    start_s: Annotated[
        float, typer.Option(help="How long a replica takes to start, until one was seen to.")
    ] = 120.0,
    scaling: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", hidden=True, help="Of ScalingSettings."),
    ] = None,
) -> int:
    """Size the pools of a cluster that Kubernetes runs, until told to stop.

    Nothing happens to the pools when this ends. `pdserve scale` reaches it from its own pod.
    """
    objects = {
        Role.PREFILL: parse_pool_object(prefill_pool),
        Role.DECODE: parse_pool_object(decode_pool),
    }
    settings = from_pairs(ScalingSettings, scaling or (), "--scaling")
    with renaming(SCALING_FLAGS):
        settings = replace(
            settings,
            prefill=read_size(prefill, "--prefill"),
            decode=read_size(decode, "--decode", fewest=1),
            most_in_all=max_replicas,
            ttft_s=ttft_target_s,
            tpot_s=tpot_target_s,
            start_s=start_s,
            leave_by_number=_leaves_by_number(objects),
        )
    if settings.prefill.most == 0:
        # Decode replicas prefill: there need be no such object.
        del objects[Role.PREFILL]
    api = KubernetesConfig(
        url=api_url,
        token_file=token_file,
        ca_file=ca_file,
        namespace=namespace or read_namespace(),
    )
    pools = KubernetesPools(
        KubernetesApi(api),
        objects,
        RedisRegistry(redis, cluster),
        router_selector=router_selector,
        router_port=router_port,
    )
    stopped = _hear_signals()
    with (
        pools,
        Autoscaling(
            pools,
            settings,
            name=cluster,
            api_key=None if api_keys_file is None else read_key(Path(api_keys_file)),
            profiles=profile or (),
            report=write_line,
            control_folder=control_folder(read_runtime_folder()),
        ),
    ):
        write_line(f"sizes {prefill_pool} {prefill} and {decode_pool} {decode}")
        stopped.wait()
    return 0


def _hear_signals() -> threading.Event:
    """Returns what SIGTERM and SIGINT set from now on."""
    stopped = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stopped


def _leaves_by_number(objects: dict[Role, PoolObject]) -> bool:
    kinds = {held.kind for held in objects.values()}
    if len(kinds) > 1:
        raise ConfigError("--prefill-pool and --decode-pool must be of one kind")
    return kinds == {"statefulsets"}
