import pytest

from launcher.ray_placement import RayNode, ReplicaNeeds, explain_wait, place_replica

HERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"
NODES = (
    RayNode(address=HERE, num_cpus=2.0),
    RayNode(address=HERE, num_cpus=4.0, num_gpus=2.0),
    RayNode(address=ELSEWHERE, num_cpus=64.0, num_gpus=4.0),
)


def needs(*ranks: int, gpus: bool = False, machine: str | None = HERE) -> ReplicaNeeds:
    return ReplicaNeeds(ranks_of_bundles=ranks, uses_gpus=gpus, machine=machine)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks_that_are_not_spread_are_one_bundle_and_so_on_one_node(num_ranks: int) -> None:
    placement = place_replica(needs(num_ranks))
    assert placement.strategy == "STRICT_PACK"
    assert [bundle["CPU"] for bundle in placement.bundles] == [float(num_ranks)]


def test_stages_are_a_bundle_each_and_spread() -> None:
    placement = place_replica(needs(2, 2, 2))
    assert placement.strategy == "SPREAD"
    assert [bundle["CPU"] for bundle in placement.bundles] == [2.0] * 3


def test_each_rank_takes_a_gpu_if_it_computes_on_one() -> None:
    bundles = place_replica(needs(2, 2, gpus=True)).bundles
    assert [bundle["GPU"] for bundle in bundles] == [2.0, 2.0]
    assert all("GPU" not in bundle for bundle in place_replica(needs(2, 2)).bundles)


def test_a_replica_stays_on_the_launchers_machine_and_leaves_room_for_others_there() -> None:
    bundles = place_replica(needs(8, 8)).bundles
    shares = [bundle[f"node:{HERE}"] for bundle in bundles]
    assert all(set(bundle) == {"CPU", f"node:{HERE}"} for bundle in bundles)
    assert 0 < sum(shares) <= 0.01


def test_a_replica_that_may_be_anywhere_is_bound_to_no_machine() -> None:
    assert place_replica(needs(2, 2, machine=None)).bundles == ({"CPU": 2.0}, {"CPU": 2.0})


def test_a_replica_of_a_pool_goes_where_the_pools_resource_is_and_leaves_room_there() -> None:
    wanted = ReplicaNeeds(
        ranks_of_bundles=(2, 2), uses_gpus=True, machine=None, resource="pdserve_decode"
    )
    bundles = place_replica(wanted).bundles
    assert all(set(bundle) == {"CPU", "GPU", "pdserve_decode"} for bundle in bundles)
    assert 0 < sum(bundle["pdserve_decode"] for bundle in bundles) <= 0.01


def test_a_replica_of_a_pool_waits_for_a_node_of_that_pool_alone() -> None:
    wanted = ReplicaNeeds(
        ranks_of_bundles=(2,), uses_gpus=False, machine=None, resource="pdserve_decode"
    )
    of_prefill = RayNode(address=HERE, num_cpus=8.0, others=frozenset({"pdserve_prefill"}))
    text = explain_wait(wanted, [of_prefill])
    assert "2 CPU on one Ray node with pdserve_decode" in text
    assert "(there is none)" in text
    of_decode = RayNode(address=HERE, num_cpus=8.0, others=frozenset({"pdserve_decode"}))
    text = explain_wait(wanted, [of_prefill, of_decode])
    assert text == "waits for 2 CPU on one Ray node with pdserve_decode to be free"


def test_a_replica_that_fits_waits_for_free_room() -> None:
    text = explain_wait(needs(4), NODES)
    assert text == f"waits for 4 CPU on one Ray node at {HERE} to be free"
    text = explain_wait(needs(2, 2, gpus=True, machine=None), NODES)
    assert text == "waits for 2 times 2 CPU and 2 GPU on one Ray node to be free"


@pytest.mark.parametrize(
    ("wanted", "nodes", "shown"),
    [
        (needs(5), NODES, "(2 CPU, 4 CPU)"),
        (needs(3, 3, gpus=True), NODES, "(2 CPU and 0 GPU, 4 CPU and 2 GPU)"),
        (needs(5), NODES[2:], "(there is none)"),
        (needs(1), (), "(there is none)"),
    ],
)
def test_a_replica_that_fits_on_no_node_is_told_that_waiting_alone_is_in_vain(
    wanted: ReplicaNeeds, nodes: tuple[RayNode, ...], shown: str
) -> None:
    text = explain_wait(wanted, nodes)
    assert "no node is so large" in text
    assert shown in text
    assert "never spread over nodes" in text
