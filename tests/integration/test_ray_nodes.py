"""A Ray cluster of two nodes on this machine: each replica whole on one of them, moved if it dies.

The replicas are stand-ins: what is tried is where Ray puts them.
"""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.local_pool import LocalCluster
from launcher.ray_pool import RayConfig, RayPlace
from pdserve.process import is_running, list_descendants
from pdserve.request import Role
from tests.integration.test_launcher import stand_in
from tests.support.cluster import cluster_config, wait_until
from tests.support.models import tiny_llama_folder  # noqa: F401

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0

ASK = """
import json, os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the cluster is on loopback
import ray
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False)
groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
print(json.dumps({group["name"]: sorted(group["bundles_to_node_id"].values()) for group in groups}))
ray.shutdown()
"""


class RayNodes:
    """The cluster's process; see `tests/support/ray_nodes.py`."""

    def __init__(self, num_cpus: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes", str(num_cpus)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._read()
        assert self.address, "Ray did not start"

    def order(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        assert self._read() in ("added", "killed")

    def nodes_of(self) -> dict[str, list[str]]:
        """Returns the node of each rank, by replica and life."""
        asked = subprocess.run(
            [sys.executable, "-c", ASK, self.address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0, asked.stderr
        found: dict[str, list[str]] = json.loads(asked.stdout.splitlines()[-1])
        return found

    def stop(self) -> None:
        pids = list_descendants(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
        wait_until(lambda: not any(map(is_running, pids)), 30.0)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def ray_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """Nodes of 3 and of 2 CPUs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = RayNodes(3)
    try:
        nodes.order("add 2")
        yield nodes
    finally:
        nodes.stop()


def test_replicas_take_a_node_each_whole_and_move_to_another_when_theirs_is_killed(
    tiny_llama_folder: Path,  # noqa: F811
    ray_nodes: RayNodes,
) -> None:
    lines: list[str] = []
    config = cluster_config(
        tiny_llama_folder, num_prefill=1, num_decode=2, decode_tensor_parallel=2,
        ready_timeout_s=START_S, drain_timeout_s=5.0,
    )  # fmt: skip
    cluster = LocalCluster(
        config,
        report=lines.append,
        command_of=stand_in,
        place=RayPlace(
            RayConfig(address=ray_nodes.address),
            report=lines.append,
            engines={Role.DECODE: config.decode_engine},
        ),
    )
    try:
        cluster.start()
        before = ray_nodes.nodes_of()
        assert sorted(len(ranks) for ranks in before.values()) == [1, 2, 2]
        assert all(len(set(ranks)) == 1 for ranks in before.values())
        assert len({ranks[0] for ranks in before.values()}) == 2
        ray_nodes.order("kill")
        ray_nodes.order("add 2")
        wait_until(lambda: sum(m.num_restarts for m in cluster.members()) >= 1, START_S)
        wait_until(lambda: all(m.record is not None for m in cluster.members()), START_S)
        wait_until(lambda: any("starts again" in line for line in lines), 5.0)
        after = ray_nodes.nodes_of()
        assert sorted(len(ranks) for ranks in after.values()) == [1, 2, 2]
        moved = set(after) - set(before)
        assert moved, (before, after)
        lost = {before[name][0] for name in set(before) - set(after)}
        assert len(lost) == 1
        assert lost.isdisjoint(node for ranks in after.values() for node in ranks)
    except BaseException:
        print("\n".join(lines))
        raise
    finally:
        cluster.stop()
