"""Where a replica goes in a Ray cluster: pure, one placement group a replica, one bundle a rank.

A face starts its ranks itself and speaks to them over socket pairs, so all ranks of a replica,
pipeline stages too, share a node. Which node that is, is Ray's choice among those of the launcher's
machine: everything of a cluster listens on one address there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PINNED = 0.001
"""Of Ray's own resource `node:<address>`, of which each node has 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """What is known of a node of the Ray cluster."""

    address: str
    num_cpus: float
    """In all, free or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlacement:
    """The placement group of one replica. The face's actor goes into the first bundle."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: str = "STRICT_PACK"


def place_replica(num_ranks: int, machine: str) -> ReplicaPlacement:
    """Returns a group that fits on one node of a machine, or nowhere.

    Args:
        num_ranks: of the replica; each takes a CPU.
        machine: address of the launcher's machine, as Ray calls it.
    """
    bundle = {"CPU": 1.0, f"node:{machine}": _PINNED}
    return ReplicaPlacement(bundles=(bundle,) * num_ranks)


def explain_wait(num_ranks: int, machine: str, nodes: Sequence[RayNode]) -> str:
    """Says what a replica waits for, and whether waiting can help."""
    here = [node.num_cpus for node in nodes if node.address == machine]
    if max(here, default=0.0) >= num_ranks:
        return f"waits for {num_ranks} free CPU on one Ray node at {machine}"
    return (
        f"waits for a Ray node at {machine} with {num_ranks} CPU; the largest has "
        f"{max(here, default=0.0):g}: ranks of one replica are not spread over nodes"
    )
