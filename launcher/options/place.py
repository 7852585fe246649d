"""Where replicas run: as child processes, or as Ray actors."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from launcher.ray_pool import RayConfig
from pdserve.config.cluster import ClusterConfig
from pdserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOptions:
    """The launcher, and how it uses Ray."""

    launcher: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where replicas run: as child processes, or as Ray actors."),
    ] = "local"
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster; without it one starts on loopback.")
    ] = None
    ray_dashboard: Annotated[
        bool, typer.Option("--ray-dashboard", help="With Ray's dashboard, on loopback.")
    ] = False
    ray_nodes: Annotated[
        Literal["here", "any"],
        typer.Option(
            help="Where replicas may be: on this machine, or on any node, listening on its address."
        ),
    ] = "here"
    ray_pools: Annotated[
        bool,
        typer.Option(
            "--ray-pools",
            help="Replicas only where Ray's resource pdserve_prefill or pdserve_decode is.",
        ),
    ] = False

    @property
    def flip_obstacle(self) -> str | None:
        """Why no replica could change its pool where it is; None where it could."""
        return "with --ray-pools each role has nodes of its own" if self.ray_pools else None

    def ray(self) -> RayConfig | None:
        """Returns how Ray is used; None without it.

        Raises:
            ConfigError: Ray's flags are given, but not its launcher.
        """
        if self.launcher == "ray":
            return RayConfig(
                address=self.ray_address,
                has_dashboard=self.ray_dashboard,
                is_anywhere=self.ray_nodes == "any",
                has_pools=self.ray_pools,
            )
        is_anywhere = self.ray_nodes == "any"
        if self.ray_address is not None or self.ray_dashboard or self.ray_pools or is_anywhere:
            raise ConfigError(
                "--ray-address, --ray-dashboard, --ray-pools and --ray-nodes need --launcher ray"
            )
        return None


def check_reach(config: ClusterConfig, ray: RayConfig) -> None:
    """Refuses replicas on other nodes that could not reach what is here.

    Raises:
        ConfigError: the router, or Redis, listens on loopback alone, or pools are on one machine.
    """
    if ray.has_pools and not ray.is_anywhere:
        raise ConfigError("--ray-pools needs --ray-nodes any: a pool is somewhere else")
    if not ray.is_anywhere:
        return
    if ray.address is None:
        raise ConfigError("--ray-nodes any needs --ray-address: a cluster of our own has one node")
    if config.redis_url is None:
        raise ConfigError("--ray-nodes any needs --redis, at an address that all nodes can reach")
