import pytest

from launcher.ray_placement import place_stages

NODES = ("a", "b", "c", "d")


def nodes_of(num_stages: int, num_nodes: int) -> list[str | None]:
    return [stage.node_id for stage in place_stages(num_stages, 2, NODES[:num_nodes])]


def test_every_stage_has_a_bundle_per_tensor_rank_on_one_node() -> None:
    stages = place_stages(2, 4, NODES)
    assert [(stage.num_bundles, stage.strategy) for stage in stages] == [(4, "STRICT_PACK")] * 2


@pytest.mark.parametrize(
    ("num_stages", "num_nodes", "expected"),
    [
        (1, 1, ["a"]),
        (1, 4, ["a"]),
        (2, 1, ["a", "a"]),
        (2, 2, ["a", "b"]),
        (2, 4, ["a", "b"]),
        (4, 2, ["a", "a", "b", "b"]),
        (4, 3, ["a", "a", "b", "c"]),
        (3, 2, ["a", "a", "b"]),
    ],
)
def test_stages_spread_in_order_over_the_nodes(
    num_stages: int, num_nodes: int, expected: list[str]
) -> None:
    assert nodes_of(num_stages, num_nodes) == expected


def test_without_known_nodes_the_choice_is_left_to_ray() -> None:
    assert nodes_of(2, 0) == [None, None]
