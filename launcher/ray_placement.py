"""Where the ranks of a replica go in a Ray cluster: pure, one bundle a rank.

Tensor ranks of a stage exchange tensors in every layer and share a node; stages exchange one tensor
a step and take a node each while there are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlacement:
    """The placement group of one stage."""

    num_bundles: int
    strategy: str
    node_id: str | None
    """Where it should go if it fits; None leaves it to Ray."""


def place_stages(
    num_stages: int, ranks_per_stage: int, node_ids: Sequence[str]
) -> tuple[StagePlacement, ...]:
    """Returns one placement group per stage.

    Args:
        num_stages: pipeline stages.
        ranks_per_stage: tensor ranks of each.
        node_ids: nodes that may hold ranks of this replica, that of stage 0 first.
    """
    return tuple(
        StagePlacement(
            num_bundles=ranks_per_stage,
            strategy="STRICT_PACK",
            # Neighbours stay together when stages outnumber nodes.
            node_id=node_ids[stage * min(len(node_ids), num_stages) // num_stages]
            if node_ids
            else None,
        )
        for stage in range(num_stages)
    )
