"""A Ray cluster of two hosts with addresses of their own: namespaces joined by veth."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.held_port import HeldPort
from launcher.local_pool import LocalCluster
from launcher.ray_pool import RayConfig, RayPlace
from pdserve.config.engine import EngineConfig
from pdserve.models.registry import load_model
from pdserve.process import spawn
from pdserve.request import Role
from tests.support.cluster import ClusterHarness, cluster_config, wait_until
from tests.support.generation import generate, make_request, make_runner
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.net_namespace import NetNamespace, answers, net_namespace, running_redis
from tests.support.oracles import assert_not_recomputed

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STORE_BYTES = 80 << 20


@pytest.fixture
def host() -> Iterator[NetNamespace]:
    with net_namespace() as found:
        yield found


@pytest.fixture
def ray_address(host: NetNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster with two CPUs on either host."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    held = HeldPort(host.near)
    port = held.number
    held.close()  # Ray tries whether it is free
    common = ["--block", "--num-cpus", "2", "--object-store-memory", str(STORE_BYTES)]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", *common]
    head = [*start, "--head", "--include-dashboard", "false"]
    head += ["--port", str(port), "--node-ip-address", host.near]
    other = [*start, "--address", f"{host.near}:{port}", "--node-ip-address", host.far]
    raylets = [spawn(head, stdout=subprocess.DEVNULL, name="ray-head")]
    try:
        wait_until(lambda: answers(host.near, port), START_S)
        raylets.append(spawn(host.wrap(other), stdout=subprocess.DEVNULL, name="ray-other"))
        yield f"{host.near}:{port}"
    finally:
        for raylet in raylets:
            raylet.stop(20.0)


@pytest.mark.soak
async def test_TOK_a_replica_with_a_stage_on_either_host_listens_on_the_address_of_each(
    tiny_llama_folder: Path,  # noqa: F811
    host: NetNamespace,
    ray_address: str,
) -> None:
    engine = EngineConfig(model=str(tiny_llama_folder), max_model_len=1024)
    runner = make_runner(load_model(tiny_llama_folder, engine), engine)
    prompt = tuple(range(10, 140))
    expected = generate(runner, make_request(prompt), 16, range(32))
    with running_redis(host.near) as url:
        config = cluster_config(
            tiny_llama_folder, host=host.near, redis_url=url, decode_pipeline_parallel=2,
            spread_stages=True, stage_token=secrets.token_hex(16), ready_timeout_s=START_S,
            drain_timeout_s=5.0,
        )  # fmt: skip
        harness = ClusterHarness(config)
        place = RayPlace(
            RayConfig(address=ray_address, is_anywhere=True),
            report=harness.lines.append,
            engines={Role.PREFILL: config.engine, Role.DECODE: config.decode_engine},
        )
        cluster = harness.cluster = LocalCluster(config, report=harness.lines.append, place=place)
        try:
            cluster.start()
            async with harness.connect() as client:
                found = await client.generate(
                    prompt_ids=prompt, max_tokens=16, temperature=0.0, ignore_eos=True
                )
                assert list(found.token_ids) == expected
                assert_not_recomputed(found)
                workers = await client.loads()
            ranks = workers["decode-0"].ranks
            assert {rank.node for rank in ranks} == {host.near, host.far}
            for worker in workers.values():
                node = worker.ranks[0].node
                assert worker.address.startswith(f"{node}:")
        except BaseException:
            print("\n".join(harness.lines))
            raise
        finally:
            cluster.stop()
