"""Prefix caches and the router's index of them, while replicas come, go and are not heard."""

import pytest

from benchmarks.autoscaler import SETTINGS
from pdserve.request import Role
from simulation.piece_chain import PieceChain
from simulation.record import Outcome
from simulation.workload import Arrival, Piece, make_workload
from tests.support.scaled_load import ScaledLoad, fixed

PREFIX = Piece(7, 4096)


def load_of(*times: float, **over: object) -> ScaledLoad:
    """Makes requests behind one long prefix, with 64 tokens of their own each."""
    workload = make_workload(
        "asks",
        [
            Arrival(at_s=at_s, pieces=(PREFIX, Piece(100 + n, 64)), num_output_tokens=20)
            for n, at_s in enumerate(times)
        ],
    )
    over = {
        "sizes": (2, 1),
        "settings": fixed(2, 1),
        "start_s": 2.0,
        "cache_events_s": 0.02,
        **over,
    }
    return ScaledLoad(lambda _: 0.1, times[-1], workload=workload, **over)


def run(load: ScaledLoad) -> list[int]:
    """Returns the cached tokens of each request."""
    load.run()
    records = sorted(load.result.records, key=lambda one: one.at_s)
    assert {one.outcome for one in records} == {Outcome.DONE}
    return [one.cached_tokens for one in records]


def believers(load: ScaledLoad) -> dict[str, int]:
    """Returns the tokens of the prefix that the router believes each prefill replica to have."""
    found = load.cluster.brain.believed_cached(PieceChain([PREFIX], 128).granules())
    return {name: count for name, count in found.items() if name.startswith("prefill")}


def holder(load: ScaledLoad) -> str:
    """Names the prefill replica that has the prefix."""
    (name,) = (
        key.worker_id
        for key, node in load.cluster.nodes.prefills.items()
        if node.scheduler.load().cached_blocks
    )
    return name


def test_A12_cached_tokens_are_0_in_a_cold_pool_and_the_real_number_in_a_warm_one():
    load = load_of(1.0, 10.0, 20.0)
    assert run(load) == [0, 4096, 4096]


def test_A12_what_left_with_its_replica_is_cached_no_more():
    load = load_of(1.0, 10.0, 40.0, 50.0, settings=SETTINGS)
    load.at(20.0, lambda: load.replicas.drain(holder(load)))
    assert run(load) == [0, 4096, 0, 4096]


def test_A12_the_autoscaler_is_not_told_of_tokens_that_caches_have():
    load = load_of(*(2.0 * number for number in range(120)), sizes=(1, 1), settings=fixed(1, 1))
    cached = run(load)
    assert cached[0] == 0
    assert set(cached[1:]) == {4096}
    first, last = (load.readings[at_s].traffic for at_s in (200.0, 230.0))
    assert first is not None
    assert last is not None
    told = last.prompt_tokens - first.prompt_tokens
    assert 64 <= told / (last.num_arrived - first.num_arrived) < 200


@pytest.mark.parametrize("end", ["killed", "flipped"])
def test_C12_the_index_knows_nothing_of_a_life_that_has_ended(end: str):
    load = load_of(1.0, 10.0, 40.0, 50.0, settings=SETTINGS, sizes=(2, 1))
    beliefs = []

    def end_it() -> None:
        name = holder(load)
        if end == "killed":
            load.cluster.kill(load.key(name))
        else:
            load.replicas.flip(name, Role.DECODE)

    load.at(19.0, lambda: beliefs.append(believers(load)))
    load.at(20.0, end_it)
    load.at(35.0, lambda: beliefs.append(believers(load)))
    load.at(49.0, lambda: beliefs.append(believers(load)))
    assert run(load) == [0, 4096, 0, 4096]
    before, between, after = beliefs
    assert list(before.values()) == [4096]
    assert between == {}
    assert list(after.values()) == [4096]


def test_C12_missed_cache_events_cost_no_request_and_the_index_is_right_again_afterwards():
    load = load_of(1.0, 10.0, 25.0, 26.0, 40.0, 50.0)
    beliefs = []
    load.at(20.0, lambda: load.cluster.brain.caches.miss(holder(load)))
    load.at(24.0, lambda: beliefs.append(believers(load)))
    for name in ("prefill-0", "prefill-1"):
        load.at(30.0, lambda name=name: load.cluster.brain.caches.look_anew(name))
    load.at(31.0, lambda: beliefs.append(believers(load)))
    cached = run(load)
    assert cached[:2] == [0, 4096]
    assert cached[-2:] == [4096, 4096]
    assert beliefs[0] == {}
    assert 4096 in beliefs[1].values()
