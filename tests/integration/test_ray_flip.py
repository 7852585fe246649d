"""Replicas in Ray actors that change their pool by somebody's order: same actor, face and ranks."""

import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autoscaler.settings import PoolRange, ScalingSettings
from launcher.local_pool import LocalCluster
from launcher.ray_pool import RayConfig, RayPlace
from launcher.scaled_cluster import autoscale_launched
from pdserve.request import Role
from tests.support.cluster import TEST_ENGINE, ClusterHarness, cluster_config
from tests.support.faults import Plan, Undisturbed
from tests.support.flips import RequestStream, wait_role, wait_works_as
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_ledger

PLANS = (
    Plan(prompt_ids=tuple(range(10, 110)), max_tokens=24),
    Plan(prompt_ids=tuple(range(200, 290)), max_tokens=24, temperature=0.9, seed=11),
)
SETTINGS = ScalingSettings(prefill=PoolRange(least=2, most=2), decode=PoolRange())
RESTART_TIMEOUT_S = 60.0


@pytest.fixture
def on_ray(
    tiny_llama_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ClusterHarness]:
    """Replicas of two tensor ranks, each in an actor, that can flip."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    engine = replace(TEST_ENGINE, model=str(tiny_llama_folder), tensor_parallel=2)
    config = cluster_config(
        tiny_llama_folder, num_prefill=2, engine=engine, can_flip=True, max_local_prefill_tokens=0
    )
    harness = ClusterHarness(config)
    engines = {Role.PREFILL: config.engine, Role.DECODE: config.decode_engine}
    place = RayPlace(RayConfig(num_cpus=8), report=harness.lines.append, engines=engines)
    harness.cluster = LocalCluster(config, report=harness.lines.append, place=place)
    try:
        harness.cluster.start()
        yield harness
    except BaseException:
        print("\n".join(harness.lines[-60:]))
        raise
    finally:
        harness.cluster.stop()


@pytest.mark.soak
async def test_replica_in_an_actor_flips_by_order_and_comes_back_there_when_it_is_killed(
    on_ray: ClusterHarness,
) -> None:
    cluster = on_ray.cluster
    was = cluster.member("prefill-1")
    assert was.face_pid is not None
    assert was.record is not None
    actor = psutil.Process(was.face_pid).ppid()
    async with on_ray.connect() as client:
        known = Undisturbed(on_ray)
        await known.learn(client, PLANS)
        with autoscale_launched(
            cluster, on_ray.config, SETTINGS, report=on_ray.lines.append, control_folder=None
        ) as scaled:
            async with RequestStream(client, known, PLANS, 2) as stream:
                scaled.controller.flip("prefill-1", Role.DECODE)
                now = await wait_role(on_ray, "prefill-1", Role.DECODE)
                await wait_works_as(client, "prefill-1", Role.DECODE)
                assert now.record is not None
                assert now.face_pid == was.face_pid
                assert psutil.Process(was.face_pid).ppid() == actor
                assert now.record.rank_pids == was.record.rank_pids
                os.kill(now.record.rank_pids[1], signal.SIGKILL)
                await stream.wait_more(4)
                back = await wait_role(on_ray, "prefill-1", Role.DECODE, RESTART_TIMEOUT_S)
                await wait_works_as(client, "prefill-1", Role.DECODE)
            assert back.num_restarts == 1
            settings = scaled.controller.settings
            assert (settings.prefill, settings.decode) == (PoolRange(), PoolRange(least=2, most=2))
        await assert_ledger(client, 3)
