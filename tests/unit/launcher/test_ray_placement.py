import pytest

from launcher.ray_placement import RayNode, explain_wait, place_replica

HERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"
NODES = (
    RayNode(address=HERE, num_cpus=2.0),
    RayNode(address=HERE, num_cpus=4.0),
    RayNode(address=ELSEWHERE, num_cpus=64.0),
)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_all_ranks_of_a_replica_share_one_node(num_ranks: int) -> None:
    placement = place_replica(num_ranks, HERE)
    assert placement.strategy == "STRICT_PACK"
    assert [bundle["CPU"] for bundle in placement.bundles] == [1.0] * num_ranks


def test_a_replica_stays_on_the_launchers_machine_and_leaves_room_for_others_there() -> None:
    bundles = place_replica(8, HERE).bundles
    shares = [bundle[f"node:{HERE}"] for bundle in bundles]
    assert all(set(bundle) == {"CPU", f"node:{HERE}"} for bundle in bundles)
    assert 0 < sum(shares) <= 0.01


def test_a_replica_that_fits_waits_for_free_cpus() -> None:
    assert explain_wait(4, HERE, NODES) == f"waits for 4 free CPU on one Ray node at {HERE}"


@pytest.mark.parametrize(("nodes", "largest"), [(NODES, 4), (NODES[2:], 0), ((), 0)])
def test_a_replica_that_fits_on_no_node_is_told_that_waiting_alone_is_in_vain(
    nodes: tuple[RayNode, ...], largest: int
) -> None:
    text = explain_wait(5, HERE, nodes)
    assert f"with 5 CPU; the largest has {largest}:" in text
    assert "not spread over nodes" in text
