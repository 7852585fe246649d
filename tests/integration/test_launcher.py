"""The launcher over stand-in roles: everything about processes, nothing about models."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launcher.local_pool import LocalCluster
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig
from pdserve.errors import ConfigError, InternalError
from pdserve.request import Role

ROOT = Path(__file__).resolve().parents[2]


def stand_in(role: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.support.stand_in_role", role)


def wait_until(condition: Callable[[], bool], timeout_s: float = 45.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def earlier() -> set[int]:
    """Processes below this one before the test: other tests of this process may have left helpers
    of the standard library."""
    return descendants()


def none_are_left(pids: Iterable[int]) -> None:
    """A rank dies of its face's end: the kernel has its signal by then, it may not have run."""
    wait_until(lambda: all(is_gone(pid) for pid in pids), timeout_s=20)


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return ClusterConfig(
        engine=EngineConfig(model=str(tmp_path)),
        num_prefill=1,
        num_decode=2,
        port=0,
        http_port=0,
        ready_timeout_s=30,
        drain_timeout_s=5,
    )


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def cluster(config: ClusterConfig, lines: list[str]) -> Iterator[LocalCluster]:
    cluster = LocalCluster(config, report=lines.append, command_of=stand_in)
    cluster.start()
    yield cluster
    cluster.stop(now=True)


def test_started_cluster_is_complete_and_stops_without_a_trace(
    cluster: LocalCluster, lines: list[str]
) -> None:
    members = cluster.members()
    assert [member.worker_id for member in members] == ["prefill-0", "decode-0", "decode-1"]
    assert all(member.record is not None for member in members)
    pids = cluster.pids()
    # Redis, the router, and a face and a rank per replica.
    assert len(pids) == 2 + 2 * 3
    assert "[decode-1] decode-1 serves" in lines
    assert any(line.startswith("workers and router ready after") for line in lines)
    cluster.stop()
    assert "[router] router drains" in lines
    none_are_left(pids)


@pytest.mark.parametrize("which", ["face", "rank"])
def test_killed_replica_returns_under_a_new_incarnation(cluster: LocalCluster, which: str) -> None:
    before = cluster.member("decode-1").record
    assert before is not None
    cluster.kill("decode-1", which=which)  # type: ignore[arg-type]
    wait_until(lambda: cluster.member("decode-1").num_restarts == 1)
    wait_until(lambda: cluster.member("decode-1").record is not None)
    after = cluster.member("decode-1").record
    assert after is not None
    assert after.incarnation != before.incarnation
    assert is_gone(before.face_pid)
    none_are_left(before.rank_pids)
    assert cluster.member("decode-0").num_restarts == 0


def test_C9_frozen_replica_is_killed_and_restarted(cluster: LocalCluster, lines: list[str]) -> None:
    before = cluster.member("decode-0").record
    assert before is not None
    cluster.kill("decode-0", signal_number=signal.SIGSTOP)
    # The lease ends after 3 s, and the replica is given up after three lease times.
    wait_until(lambda: cluster.member("decode-0").num_restarts == 1, timeout_s=60)
    wait_until(lambda: cluster.member("decode-0").record is not None)
    assert "decode-0 is alive but holds no lease: killing it" in lines
    none_are_left((before.face_pid, *before.rank_pids))


def test_killed_router_returns_on_the_same_port(cluster: LocalCluster) -> None:
    pid = cluster.router_pid
    cluster.kill_router()
    wait_until(lambda: cluster.router_pid not in (None, pid))


def test_C18_killed_redis_returns_and_no_replica_is_restarted(cluster: LocalCluster) -> None:
    redis = cluster.redis
    assert redis is not None
    pid = redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: redis.pid not in (None, pid) and redis.is_running())
    wait_until(lambda: all(member.record is not None for member in cluster.members()))
    assert [member.num_restarts for member in cluster.members()] == [0, 0, 0]


def test_killing_an_unknown_replica_is_an_error(cluster: LocalCluster) -> None:
    with pytest.raises(KeyError):
        cluster.kill("decode-9")


def test_replica_that_does_not_end_is_killed_after_the_drain_timeout(
    config: ClusterConfig, lines: list[str]
) -> None:
    config = replace(config, drain_timeout_s=0.2, prefill_faults=FaultConfig(reject_reservations=5))
    cluster = LocalCluster(config, report=lines.append, command_of=stand_in)
    cluster.start()
    pids = cluster.pids()
    started_s = time.monotonic()
    cluster.stop()
    assert time.monotonic() - started_s > 5, "the grace after the time to drain"
    none_are_left(pids)
    assert [line for line in lines if "overstays" in line] == [
        "prefill-0 overstays its drain: killing it"
    ]


def test_pool_grows_and_a_drained_replica_leaves_for_good(
    cluster: LocalCluster, lines: list[str]
) -> None:
    cluster.scale(Role.DECODE, 3)
    wait_until(
        lambda: len(cluster.members()) == 4 and cluster.member("decode-2").record is not None
    )
    pids = cluster.pids()
    cluster.drain("decode-0")
    wait_until(lambda: len(cluster.members()) == 3)
    assert [m.worker_id for m in cluster.members()] == ["prefill-0", "decode-1", "decode-2"]
    wait_until(lambda: sum(is_gone(pid) for pid in pids) == 2)
    assert "decode-0 drains for good" in lines


def start_with_fault(config: ClusterConfig, number: int) -> None:
    broken = replace(config, decode_faults=FaultConfig(reject_reservations=number))
    LocalCluster(broken, command_of=stand_in).start()


def test_replica_that_refuses_its_settings_stops_the_start_with_its_line(
    config: ClusterConfig, earlier: set[int]
) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1, got 0"):
        start_with_fault(config, 2)
    none_are_left(descendants() - earlier)


def test_replica_that_crashes_stops_the_start_by_name(
    config: ClusterConfig, earlier: set[int]
) -> None:
    with pytest.raises(InternalError, match=r"decode-\d ended \(status 1\) before it was ready"):
        start_with_fault(config, 3)
    none_are_left(descendants() - earlier)


def test_replica_that_never_registers_is_named_after_the_time_limit(
    config: ClusterConfig, earlier: set[int]
) -> None:
    with pytest.raises(InternalError, match="not ready after 2 s: decode-0, decode-1"):
        start_with_fault(replace(config, ready_timeout_s=2), 4)
    none_are_left(descendants() - earlier)


def test_port_in_use_is_one_clear_error(config: ClusterConfig, cluster: LocalCluster) -> None:
    taken = int(cluster.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {taken} is already in use"):
        LocalCluster(replace(config, port=taken), command_of=stand_in).start()


def test_redis_that_does_not_answer_is_one_clear_error_without_its_password(
    config: ClusterConfig,
) -> None:
    url = "redis://:secret@127.0.0.1:1/0"
    with pytest.raises(ConfigError, match=r"Redis at 127\.0\.0\.1:1 does not answer$"):
        LocalCluster(replace(config, redis_url=url), command_of=stand_in).start()


def test_given_redis_is_used_and_left_running(config: ClusterConfig, cluster: LocalCluster) -> None:
    assert cluster.redis is not None
    shared = replace(config, redis_url=cluster.redis_url, num_prefill=0, num_decode=1)
    with LocalCluster(shared, command_of=stand_in) as second:
        assert [member.worker_id for member in second.members()] == ["decode-0"]
        assert second.redis is None
    assert cluster.redis.is_running()
    assert all(member.record is not None for member in cluster.members())


def test_stop_during_the_start_leaves_nothing(config: ClusterConfig, earlier: set[int]) -> None:
    broken = replace(config, decode_faults=FaultConfig(reject_reservations=4))
    cluster = LocalCluster(broken, command_of=stand_in)
    cluster.launch()
    wait_until(lambda: cluster.router_pid is not None)
    cluster.request_stop()
    assert not cluster.wait_ready()
    cluster.wait()
    none_are_left(descendants() - earlier)


def test_C10_killed_launcher_leaves_no_process(config: ClusterConfig) -> None:
    script = f"""
import time
from launcher.local_pool import LocalCluster
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from tests.integration.test_launcher import stand_in
engine = EngineConfig(model={config.engine.model!r})
config = ClusterConfig(engine=engine, num_decode=1, port=0, http_port=0)
with LocalCluster(config, command_of=stand_in) as cluster:
    print(*cluster.pids(), flush=True)
    time.sleep(60)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher.stdout as pipe:
        pids = [int(pid) for pid in pipe.readline().split()]
    assert len(pids) == 6
    assert not any(is_gone(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_replica_with_more_ranks_than_gpus_is_refused_before_anything_starts(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    engine = replace(config.engine, device="cuda")
    lines: list[str] = []
    cluster = LocalCluster(
        replace(config, engine=engine, decode_tensor_parallel=2),
        report=lines.append,
        command_of=stand_in,
    )
    with pytest.raises(
        ConfigError, match=r"a decode replica of 2 tensor ranks .* needs 2 GPUs here"
    ):
        cluster.start()
    assert cluster.redis is None
    assert lines == []
