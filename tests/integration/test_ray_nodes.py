"""A Ray cluster of two nodes on this machine: replicas on one of them, or their stages on both.

Where only Ray's choice is tried, the replicas are stand-ins.
"""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.local_pool import LocalCluster
from launcher.ray_pool import RayConfig, RayPlace
from pdserve.config.engine import EngineConfig
from pdserve.models.registry import load_model
from pdserve.process import is_running, list_descendants
from pdserve.request import Role
from tests.integration.test_launcher import stand_in
from tests.support.cluster import ClusterHarness, cluster_config, wait_until
from tests.support.generation import generate, make_request, make_runner
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_not_recomputed

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
ASK_POOLS = """
import json, os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the cluster is on loopback
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
names = {name: node["NodeID"] for node in ray.nodes() for name in node["Resources"]}
print(json.dumps({name: node for name, node in names.items() if name.startswith("pdserve_")}))
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
        """Returns the node of each bundle, by replica and life."""
        found: dict[str, list[str]] = json.loads(self._ask(ASK))
        return found

    def nodes_of_pools(self) -> dict[str, str]:
        """Returns the node of each resource that is a pool's."""
        found: dict[str, str] = json.loads(self._ask(ASK_POOLS))
        return found

    def _ask(self, script: str) -> str:
        asked = subprocess.run(
            [sys.executable, "-c", script, self.address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.splitlines()[-1]

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


@pytest.mark.soak
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
        assert [len(bundles) for bundles in before.values()] == [1, 1, 1]
        assert len({bundles[0] for bundles in before.values()}) == 2
        ray_nodes.order("kill")
        ray_nodes.order("add 2")
        wait_until(lambda: sum(m.num_restarts for m in cluster.members()) >= 1, START_S)
        wait_until(lambda: all(m.record is not None for m in cluster.members()), START_S)
        wait_until(lambda: any("starts again" in line for line in lines), 5.0)
        after = ray_nodes.nodes_of()
        assert [len(bundles) for bundles in after.values()] == [1, 1, 1]
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


@pytest.mark.soak
def test_replicas_of_each_pool_go_where_its_resource_is_however_much_room_is_elsewhere(
    tiny_llama_folder: Path,  # noqa: F811
    ray_nodes: RayNodes,
) -> None:
    lines: list[str] = []
    ray_nodes.order("pool 2 pdserve_prefill")
    config = cluster_config(
        tiny_llama_folder, num_prefill=1, num_decode=2, ready_timeout_s=START_S
    )  # fmt: skip
    place = RayPlace(
        RayConfig(address=ray_nodes.address, has_pools=True), report=lines.append
    )  # fmt: skip
    cluster = LocalCluster(config, report=lines.append, command_of=stand_in, place=place)
    try:
        cluster.launch()
        text = "waits for 1 CPU on one Ray node at 127.0.0.1 with pdserve_decode"
        wait_until(lambda: any(text in line for line in lines), START_S)
        # What an autoscaler of Ray would do for a group of pods with that resource.
        ray_nodes.order("pool 2 pdserve_decode")
        assert cluster.wait_ready()
        pools = ray_nodes.nodes_of_pools()
        placed = ray_nodes.nodes_of()
        assert len(placed) == 3
        for name, bundles in placed.items():
            assert bundles == [pools[f"pdserve_{name.partition('-')[0]}"]]
    except BaseException:
        print("\n".join(lines))
        raise
    finally:
        cluster.stop()


@pytest.mark.soak
async def test_TOK_stages_spread_over_two_nodes_give_the_tokens_of_one_rank_and_move_if_one_dies(
    tiny_llama_folder: Path,  # noqa: F811
    ray_nodes: RayNodes,
) -> None:
    engine = EngineConfig(model=str(tiny_llama_folder), max_model_len=1024)
    runner = make_runner(load_model(tiny_llama_folder, engine), engine)
    prompt = tuple(range(10, 140))
    expected = generate(runner, make_request(prompt), 16, range(32))
    config = cluster_config(
        tiny_llama_folder, num_prefill=1, decode_pipeline_parallel=2, spread_stages=True,
        stage_token=secrets.token_hex(16), ready_timeout_s=START_S, drain_timeout_s=5.0,
    )  # fmt: skip
    harness = ClusterHarness(config)
    place = RayPlace(
        RayConfig(address=ray_nodes.address),
        report=harness.lines.append,
        engines={Role.PREFILL: config.engine, Role.DECODE: config.decode_engine},
    )
    cluster = harness.cluster = LocalCluster(config, report=harness.lines.append, place=place)
    try:
        cluster.start()
        (stages,) = (
            nodes for name, nodes in ray_nodes.nodes_of().items() if name.startswith("decode-0")
        )
        assert len(set(stages)) == 2

        async def serve() -> None:
            async with harness.connect() as client:
                found = await client.generate(
                    prompt_ids=prompt, max_tokens=16, temperature=0.0, ignore_eos=True
                )
                assert list(found.token_ids) == expected
                assert_not_recomputed(found)
                assert len((await client.loads())["decode-0"].ranks) == 2

        await serve()
        ray_nodes.order("kill")
        ray_nodes.order("add 2")
        wait_until(lambda: cluster.member("decode-0").num_restarts >= 1, START_S)
        wait_until(lambda: all(m.record is not None for m in cluster.members()), START_S)
        await serve()
    except BaseException:
        print("\n".join(harness.lines))
        raise
    finally:
        cluster.stop()


@pytest.mark.soak
def test_each_rank_asks_for_a_gpu_and_stages_of_one_replica_get_them_on_two_nodes(
    tiny_llama_folder: Path,  # noqa: F811
    ray_nodes: RayNodes,
) -> None:
    ray_nodes.order("add 4 3")
    ray_nodes.order("add 4 2")
    lines: list[str] = []
    config = cluster_config(
        tiny_llama_folder, num_prefill=1, num_decode=1, decode_tensor_parallel=2,
        decode_pipeline_parallel=2, spread_stages=True, stage_token=secrets.token_hex(16),
        ready_timeout_s=START_S, drain_timeout_s=5.0,
    )  # fmt: skip
    config = replace(config, engine=replace(config.engine, device="cuda"))
    place = RayPlace(
        RayConfig(address=ray_nodes.address),
        report=lines.append,
        engines={Role.PREFILL: config.engine, Role.DECODE: config.decode_engine},
    )
    cluster = LocalCluster(config, report=lines.append, command_of=stand_in, place=place)
    try:
        cluster.start()
        nodes = {name.rpartition("-")[0]: where for name, where in ray_nodes.nodes_of().items()}
        assert len(set(nodes["decode-0"])) == 2
        seen = {m.worker_id: visible_gpus(m.face_pid) for m in cluster.members()}
        assert {name: len(gpus) for name, gpus in seen.items()} == {"prefill-0": 1, "decode-0": 2}
    except BaseException:
        print("\n".join(lines))
        raise
    finally:
        cluster.stop()


def visible_gpus(pid: int | None) -> list[str]:
    assert pid is not None
    variables = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
    (found,) = (v for v in variables if v.startswith("CUDA_VISIBLE_DEVICES="))
    return found.partition("=")[2].split(",")
