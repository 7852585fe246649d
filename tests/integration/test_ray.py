"""Replicas as actors of a real Ray cluster: loopback only, killed at every level, nothing left."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from autoscaler.settings import PoolRange, ScalingSettings
from launcher.local_pool import LocalCluster
from launcher.pool import Cluster
from launcher.ray_pool import RayConfig, RayPlace
from launcher.scaled_cluster import autoscale_launched
from pdserve.config.worker import FaultConfig
from pdserve.process import is_running, list_descendants
from pdserve.request import Role
from tests.integration.test_launcher import stand_in
from tests.support.cluster import ClusterHarness, cluster_config, wait_until
from tests.support.faults import (
    Plan,
    Undisturbed,
    incarnations,
    start_all,
    wait_for,
    wait_reborn,
)
from tests.support.models import tiny_llama_folder  # noqa: F401

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
PLANS = [
    Plan(prompt_ids=tuple(range(10, 110)), max_tokens=60),
    Plan(prompt_ids=tuple(range(200, 290)), max_tokens=60, temperature=0.9, seed=11),
]
DASHBOARD_PORT = 8265
GONE_S = 10.0
"""Case C10: after this long nothing may hold memory."""


class RayHarness(ClusterHarness):
    """A cluster on Ray, and what is known of Ray's own processes."""

    def __init__(self, folder: Path) -> None:
        config = cluster_config(
            folder, num_decode=2, decode_faults=FaultConfig(step_delay_s=0.02), drain_timeout_s=5.0
        )
        super().__init__(config)
        self.place = RayPlace(RayConfig(num_cpus=8), report=self.lines.append)
        self.cluster = LocalCluster(config, report=self.lines.append, place=self.place)

    def ray_pids(self) -> list[int]:
        """The keeper and all that is below it, faces and ranks included."""
        keeper = self.place.keeper_pid
        assert keeper is not None
        return [keeper, *list_descendants(keeper)]

    def pid_called(self, name: str) -> int:
        (pid,) = (pid for pid, found in names_of(self.ray_pids()).items() if found == name)
        return pid

    def ray_address(self) -> str:
        said = [line for line in self.lines if line.startswith("[ray] connected to Ray at ")]
        return said[-1].split()[5]


@pytest.fixture(scope="module")
def ray_token() -> Iterator[None]:
    """A token of this test's own: Ray asks it of everyone who joins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def ray_cluster(tiny_llama_folder: Path, ray_token: None) -> Iterator[RayHarness]:  # noqa: F811
    harness = RayHarness(tiny_llama_folder)
    try:
        harness.cluster.start()
        yield harness
    except BaseException:
        print("\n".join(harness.lines[-60:]))
        raise
    finally:
        harness.cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: RayHarness) -> Undisturbed:
    return Undisturbed(ray_cluster)


def names_of(pids: Iterable[int]) -> dict[int, str]:
    return dict(each_alive(pids, lambda process: (process.pid, process.name())))


def each_alive(pids: Iterable[int], ask: Callable[[psutil.Process], T]) -> list[T]:
    """Asks processes; Ray has some that end at any time."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(ask(psutil.Process(pid)))
    return found


def pids_of(harness: RayHarness, worker_id: str) -> tuple[int, ...]:
    """The pids of a replica: actor, face, ranks."""
    member = harness.cluster.member(worker_id)
    assert member.face_pid is not None
    assert member.record is not None
    return (psutil.Process(member.face_pid).ppid(), member.face_pid, *member.record.rank_pids)


def test_faces_run_below_actors_and_all_of_ray_listens_on_loopback_only(
    ray_cluster: RayHarness,
) -> None:
    names = {worker: psutil.Process(pids_of(ray_cluster, worker)[0]).name() for worker in
             ("prefill-0", "decode-0", "decode-1")}  # fmt: skip
    assert set(names.values()) == {"ray::FaceActor"}
    pids = ray_cluster.ray_pids()
    listening = [
        (connection.laddr.ip, connection.laddr.port)
        for connections in each_alive(pids, lambda process: process.net_connections("inet"))
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 8
    assert {ip.removeprefix("::ffff:") for ip, _ in listening} == {"127.0.0.1"}
    assert not any("dashboard http" in line for line in ray_cluster.lines)
    # Ray runs this process for its own statistics even so, but without pages to look at.
    commands = each_alive(pids, lambda process: process.cmdline())
    dashboards = [argv for argv in commands if any("dashboard.py" in word for word in argv)]
    assert all("--disable-frontend" in argv for argv in dashboards)
    assert DASHBOARD_PORT not in {port for _, port in listening}


async def test_TOK_C10_killed_actor_takes_face_and_rank_along_and_comes_back_to_serve(
    ray_cluster: RayHarness, undisturbed: Undisturbed
) -> None:
    async with ray_cluster.connect() as client:
        await undisturbed.learn(client, PLANS)
        await client.wait_idle()
        before = incarnations(ray_cluster)
        streams = start_all(client, PLANS)
        await wait_for(lambda: all(s.num_tokens > 5 for s in streams), 40.0, "streams decode")
        victim = await client.busy_worker("decode")
        pids = pids_of(ray_cluster, victim)
        os.kill(pids[0], signal.SIGKILL)
        await wait_for(lambda: not any(map(is_running, pids)), GONE_S, "the replica is gone")
        for stream in streams:
            undisturbed.check(stream.plan, await stream.end())
        await wait_reborn(ray_cluster, victim, before[victim])
        assert ray_cluster.cluster.member(victim).num_restarts == 1
        for stream in start_all(client, PLANS):
            undisturbed.check(stream.plan, await stream.end())
    after = incarnations(ray_cluster)
    assert {worker for worker in before if before[worker] != after[worker]} == {victim}


@pytest.mark.soak
def test_killed_face_is_restarted_in_a_new_actor(ray_cluster: RayHarness) -> None:
    before = incarnations(ray_cluster)["prefill-0"]
    actor, *_ = pids_of(ray_cluster, "prefill-0")
    ray_cluster.cluster.kill("prefill-0")
    wait_until(lambda: not is_running(actor), GONE_S)
    # The supervisor looks now and then, and until it has looked it knows the dead one's record.
    wait_until(lambda: ray_cluster.cluster.member("prefill-0").num_restarts == 1, 30.0)
    ray_cluster.wait_all_registered()
    assert incarnations(ray_cluster)["prefill-0"] != before


def test_pool_grows_and_a_drained_replica_leaves_for_good(ray_cluster: RayHarness) -> None:
    cluster: Cluster = ray_cluster.cluster
    cluster.scale(Role.DECODE, 3)
    wait_until(lambda: len(cluster.members()) == 4, 20.0)
    ray_cluster.wait_all_registered()
    pids = pids_of(ray_cluster, "decode-2")
    cluster.drain("decode-2")
    wait_until(lambda: len(cluster.members()) == 3, 40.0)
    wait_until(lambda: not any(map(is_running, pids)), GONE_S)
    assert "decode-2 drains for good" in ray_cluster.lines


@pytest.mark.soak
async def test_autoscaler_sizes_a_pool_that_ray_runs_and_no_request_fails(
    ray_cluster: RayHarness,
) -> None:
    cluster = ray_cluster.cluster
    ray_cluster.wait_all_registered()
    lines: list[str] = []
    settings = ScalingSettings(
        prefill=PoolRange(least=1, most=1), decode=PoolRange(least=2, most=3), settle_s=5.0
    )

    def num_serving() -> int:
        return sum(m.role is Role.DECODE and m.record is not None for m in cluster.members())

    with autoscale_launched(
        cluster, ray_cluster.config, settings, report=lines.append, control_folder=None
    ) as scaled:
        async with ray_cluster.connect() as client:
            streams = start_all(client, PLANS)
            scaled.controller.set_ranges(None, PoolRange(least=3, most=3))
            await wait_for(lambda: num_serving() == 3, 60.0, "a third actor serves")
            pids = pids_of(ray_cluster, "decode-2")
            for stream in (*streams, *start_all(client, PLANS)):
                await stream.end()
            streams = start_all(client, PLANS)
            scaled.controller.set_ranges(None, PoolRange(least=2, most=2))
            await wait_for(lambda: len(cluster.members()) == 3, 30.0, "one has left")
            for stream in streams:
                await stream.end()
    assert lines[0].startswith("decode: grow 2 -> 3: below its range")
    left = {member.worker_id for member in cluster.members()}
    if "decode-2" not in left:
        wait_until(lambda: not any(map(is_running, pids)), GONE_S)
    assert len(lines) == 2, lines


GUEST = """
import os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the cluster is on loopback
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
total, free = ray.cluster_resources(), ray.available_resources()
print(total["object_store_memory"] - free["object_store_memory"], total["CPU"] - free["CPU"])
ray.shutdown()
"""


@pytest.mark.soak
def test_second_cluster_joins_by_address_and_leaves_the_first_and_an_empty_object_store(
    ray_cluster: RayHarness,
) -> None:
    address = ray_cluster.ray_address()
    lines: list[str] = []
    config = replace(
        ray_cluster.config, port=0, num_prefill=0, num_decode=1, decode_tensor_parallel=2
    )
    engines = {Role.DECODE: config.decode_engine}
    guest = LocalCluster(
        config,
        report=lines.append,
        command_of=stand_in,
        place=RayPlace(RayConfig(address=address), report=lines.append, engines=engines),
    )
    try:
        guest.start()
        pids = guest.pids()
        asked = subprocess.run(
            [sys.executable, "-c", GUEST, address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=40,
        )
    except BaseException:
        print("\n".join(lines))
        raise
    finally:
        guest.stop()
    # Nothing in the store; a CPU for each of three ranks here and of the guest's two.
    assert asked.stdout.split() == ["0.0", "5.0"], asked.stderr
    wait_until(lambda: not any(map(is_running, pids)), GONE_S)
    assert all(member.record is not None for member in ray_cluster.cluster.members())


async def test_C10_killed_raylet_leaves_no_pid_and_its_cluster_comes_back_to_serve(
    ray_cluster: RayHarness, undisturbed: Undisturbed
) -> None:
    before = incarnations(ray_cluster)
    pids = ray_cluster.ray_pids()
    os.kill(ray_cluster.pid_called("raylet"), signal.SIGKILL)
    await wait_for(lambda: not any(map(is_running, pids)), GONE_S, "all of Ray is gone")
    for worker, incarnation in before.items():
        await wait_reborn(ray_cluster, worker, incarnation, 60.0)
    async with ray_cluster.connect() as client:
        await undisturbed.learn(client, PLANS)
        for stream in start_all(client, PLANS):
            undisturbed.check(stream.plan, await stream.end())


def test_stopped_cluster_leaves_no_process_of_ray_and_no_folder(ray_cluster: RayHarness) -> None:
    pids = [*ray_cluster.ray_pids(), *ray_cluster.cluster.pids()]
    folders = list(Path("/tmp").glob("pdserve-ray-*"))
    ray_cluster.cluster.stop()
    wait_until(lambda: not any(map(is_running, pids)), GONE_S)
    assert not [folder for folder in folders if folder.exists() and _is_ours(folder, pids)]


def _is_ours(folder: Path, pids: list[int]) -> bool:
    return any(str(pid) in path.name for pid in pids for path in folder.glob("session_2*"))


def test_C10_killed_launcher_leaves_no_process_of_ray(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    flags = ["--launcher", "ray", "--prefill", "0", "--port", "0", "--no-http"]
    flags += ["--kv-cache-memory", "16M", "--max-model-len", "512"]
    serve = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "serve", str(tiny_llama_folder), *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    try:
        wait_ready(serve, lines)
        pids = list_descendants(serve.pid)
        assert {"raylet", "gcs_server"} <= set(names_of(pids).values())
        serve.kill()
        serve.wait()
        wait_until(lambda: not any(map(is_running, pids)), GONE_S)
    except BaseException:
        print("\n".join(lines))
        raise
    finally:
        serve.kill()
        serve.wait()


def wait_ready(serve: "subprocess.Popen[str]", lines: list[str]) -> None:
    def gather() -> None:
        assert serve.stderr is not None
        with serve.stderr as pipe:
            for line in pipe:
                lines.append(line.rstrip())

    threading.Thread(target=gather, daemon=True).start()
    wait_until(lambda: any(line.startswith("ready after") for line in list(lines)), 90.0)


def test_ray_address_that_does_not_answer_is_one_clear_error(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    argv = [sys.executable, "-m", "launcher.cli", "serve", str(tiny_llama_folder), "--port", "0"]
    argv += ["--no-http", "--launcher", "ray", "--ray-address", "127.0.0.1:1"]
    found = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("pdserve: Ray at 127.0.0.1:1 does not answer")
