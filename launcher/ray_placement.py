"""Where a replica goes in a Ray cluster: pure, one placement group a replica.

A bundle is on one node by its nature. So all ranks of a replica are one bundle; or, where pipeline
stages are spread, each stage is one, and Ray puts them on as many nodes as it can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PINNED = 0.001
"""Of Ray's own resource `node:<address>`, of which each node has 1, or of a pool's resource."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """What is known of a node of the Ray cluster."""

    address: str
    num_cpus: float
    """In all, free or not."""
    num_gpus: float = 0.0
    """Likewise."""
    others: frozenset[str] = frozenset()
    """Names of all other resources that it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaNeeds:
    """What a replica takes up."""

    ranks_of_bundles: tuple[int, ...]
    """The face is in the first one."""
    uses_gpus: bool
    """One a rank."""
    machine: str | None
    """Address, as Ray calls it, of the only machine that it may be on; None: any node will do."""
    resource: str | None = None
    """Custom resource that its nodes must have; None: any node will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlacement:
    """The placement group of one replica."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: str


def place_replica(needs: ReplicaNeeds) -> ReplicaPlacement:
    """Returns the group of a replica; each rank takes a CPU, and a GPU if it uses one."""
    pin = {} if needs.machine is None else {f"node:{needs.machine}": _PINNED}
    if needs.resource is not None:
        pin[needs.resource] = _PINNED
    bundles = []
    for num_ranks in needs.ranks_of_bundles:
        gpus = {"GPU": float(num_ranks)} if needs.uses_gpus else {}
        bundles.append({"CPU": float(num_ranks), **gpus, **pin})
    strategy = "STRICT_PACK" if len(bundles) == 1 else "SPREAD"
    return ReplicaPlacement(bundles=tuple(bundles), strategy=strategy)


def explain_wait(needs: ReplicaNeeds, nodes: Sequence[RayNode]) -> str:
    """Says what a replica waits for, and whether waiting can help."""
    where = "" if needs.machine is None else f" at {needs.machine}"
    if needs.resource is not None:
        where += f" with {needs.resource}"
    usable = [
        node
        for node in nodes
        if (needs.machine is None or node.address == needs.machine)
        and (needs.resource is None or needs.resource in node.others)
    ]
    largest = max(needs.ranks_of_bundles)
    room = f"{largest} CPU" + (f" and {largest} GPU" if needs.uses_gpus else "")
    num_bundles = len(needs.ranks_of_bundles)
    wish = f"{room} on one Ray node{where}"
    if num_bundles > 1:
        wish = f"{num_bundles} times {wish}"
    fitting = [
        node
        for node in usable
        if node.num_cpus >= largest and (not needs.uses_gpus or node.num_gpus >= largest)
    ]
    if fitting:
        return f"waits for {wish} to be free"
    shown = ", ".join(
        f"{node.num_cpus:g} CPU" + (f" and {node.num_gpus:g} GPU" if needs.uses_gpus else "")
        for node in usable
    )
    return (
        f"waits for {wish}, and no node is so large ({shown or 'there is none'}): ranks that share "
        "layers are never spread over nodes"
    )
