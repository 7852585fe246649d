"""Replicas that come, go, change their pool and die, in a cluster that serves meanwhile."""

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.autoscaler import PROFILE, SETTINGS
from pdserve.errors import ConfigError
from pdserve.request import Role
from simulation.generators import Lengths
from simulation.record import Outcome
from simulation.replicas import ReplicaStage
from simulation.shape import ClusterShape, Scaling
from simulation.spans import Span, replica_s, size_at
from tests.support.scaled_load import ScaledLoad, fixed

LONG = Lengths(mean_prompt_tokens=600, mean_output_tokens=900, spread=0.2)


def steady(at_s: float) -> float:
    return 1.5


def test_a_replica_serves_when_it_has_started_and_is_slow_at_first():
    load = ScaledLoad(steady, 60.0, sizes=(1, 1), start_s=20.0, cold_s=5.0, cold_factor=3.0)
    load.at(10.0, lambda: load.replicas.scale(Role.DECODE, 2))
    seen = {}

    def look(name: str) -> None:
        one = load.replica("decode-1")
        node = None if one.key is None else load.cluster.nodes.find(one.key)
        seen[name] = (one.stage, None if node is None else node.pace.slowness)

    for at_s, name in ((29.9, "starting"), (30.1, "cold"), (35.1, "warm")):
        load.at(at_s, lambda name=name: look(name))
    load.run()
    assert seen == {
        "starting": (ReplicaStage.STARTING, None),
        "cold": (ReplicaStage.SERVING, 3.0),
        "warm": (ReplicaStage.SERVING, 1.0),
    }


def test_C15_a_draining_replica_takes_nothing_new_and_all_its_streams_end_there():
    # Streams of 900 tokens last about half a minute.
    load = ScaledLoad(steady, 60.0, sizes=(1, 3), settings=fixed(1, 3), lengths=LONG)
    there: list[set[str]] = []

    def drain() -> None:
        load.replicas.drain("decode-1")
        follow()

    def follow() -> None:
        node = load.cluster.nodes.find(key)
        if node is not None:
            there.append({str(one.request_id) for one in node.scheduler.requests()})
            load.at(load.cluster.queue.now() + 0.5, follow)

    key = load.key("decode-1")
    load.at(30.0, drain)
    load.run()
    assert len(there[0]) > 5
    # A reservation that was made before may still land; nothing joins later.
    assert all(later <= earlier for earlier, later in pairwise(there))
    assert len(there) > 20
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert {one.attempts for one in load.result.records} == {1}
    span = next(one for one in load.result.spans if one.worker_id == "decode-1")
    assert 30.0 < span.end_s < 90.0


def test_C15_a_drain_that_takes_too_long_ends_and_its_streams_go_on_elsewhere():
    load = ScaledLoad(
        steady, 60.0, sizes=(1, 3), settings=fixed(1, 3), lengths=LONG, drain_timeout_s=5.0
    )
    load.at(30.0, lambda: load.replicas.drain("decode-1"))
    load.run()
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert max(one.attempts for one in load.result.records) == 2


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_C15_a_replica_that_only_starts_is_gone_at_once(name: str):
    load = ScaledLoad(steady, 40.0, sizes=(1, 1), start_s=20.0)
    role = Role(name.partition("-")[0])
    load.at(10.0, lambda: load.replicas.scale(role, 2))
    load.at(15.0, lambda: load.replicas.drain(name))
    load.run()
    span = next(one for one in load.result.spans if one.worker_id == name)
    assert (span.begin_s, span.end_s) == (10.0, 15.0)
    assert all(one.key is None or one.worker_id != name for one in load.replicas.all())


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_replica_that_dies_starts_again_under_its_name(name: str):
    load = ScaledLoad(steady, 60.0, sizes=(2, 2), settings=fixed(2, 2), start_s=10.0)
    before = load.key(name)
    lives = []
    load.at(20.0, lambda: load.cluster.kill(load.key(name)))
    load.at(25.0, lambda: lives.append(load.replica(name).key))
    load.at(31.0, lambda: lives.append(load.replica(name).key))
    load.run()
    assert lives[0] is None
    assert lives[1] is not None
    assert (lives[1].worker_id, lives[1] == before) == (name, False)
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    # One span, all the time: what restarts is paid for.
    (span,) = (one for one in load.result.spans if one.worker_id == name)
    assert span.seconds(0.0, 60.0) == 60.0


@pytest.mark.parametrize(("name", "role"), [("prefill-1", Role.DECODE), ("decode-1", Role.PREFILL)])
def test_a_flip_drains_a_replica_and_lets_it_go_on_in_the_other_pool(name: str, role: Role):
    sizes = (1, 3) if role is Role.PREFILL else (3, 1)
    load = ScaledLoad(steady, 60.0, sizes=sizes, change_s=1.0)
    load.at(20.0, lambda: load.replicas.flip(name, role))
    stages = {}
    load.at(20.1, lambda: stages.setdefault("at once", load.replica(name).role))
    load.at(50.0, lambda: stages.setdefault("later", load.replica(name).stage))
    load.at(50.0, lambda: stages.setdefault("node", load.cluster.nodes.find(load.key(name))))
    load.run()
    assert (stages["at once"], stages["later"]) == (role, ReplicaStage.SERVING)
    pool = load.cluster.nodes.prefills if role is Role.PREFILL else load.cluster.nodes.decodes
    assert stages["node"] in pool.values()
    assert stages["node"].busy_s > 0
    old, new = (one for one in load.result.spans if one.worker_id == name)
    assert (old.end_s, new.begin_s, new.role) == (20.0, 20.0, role)
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}
    assert {one.attempts for one in load.result.records} == {1}


def test_a_flip_that_does_not_get_empty_ends_in_a_start():
    load = ScaledLoad(
        steady,
        60.0,
        sizes=(1, 3),
        lengths=LONG,
        drain_timeout_s=5.0,
        start_s=10.0,
    )
    stages = []
    load.at(20.0, lambda: load.replicas.flip("decode-1", Role.PREFILL))
    for at_s in (22.0, 30.0, 36.0):
        load.at(at_s, lambda: stages.append(load.replica("decode-1").stage))
    load.run()
    assert stages == [ReplicaStage.CHANGING, ReplicaStage.STARTING, ReplicaStage.SERVING]
    assert {one.outcome for one in load.result.records} == {Outcome.DONE}


def test_an_order_for_a_replica_that_is_gone_says_so():
    load = ScaledLoad(steady, 10.0)
    with pytest.raises(KeyError):
        load.replicas.drain("decode-7")
    with pytest.raises(KeyError):
        load.replicas.flip("decode-7", Role.PREFILL)


def test_replicas_of_two_profiles_cannot_flip_in_place():
    with pytest.raises(ConfigError, match="cannot change their pool"):
        ClusterShape(
            prefill=PROFILE,
            decode=replace(PROFILE, worker_class="other"),
            num_prefill=1,
            num_decode=1,
            scaling=Scaling(settings=replace(SETTINGS, flips_in_place=True)),
        )


def test_spans_count_what_lies_within_a_time():
    spans = [Span("a", Role.PREFILL, 0.0, 10.0), Span("b", Role.PREFILL, 5.0)]
    assert replica_s(spans, 2.0, 20.0) == {Role.PREFILL: 8.0 + 15.0, Role.DECODE: 0.0}
    assert [size_at(spans, Role.PREFILL, at_s) for at_s in (0.0, 5.0, 10.0)] == [1, 2, 1]
