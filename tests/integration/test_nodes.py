"""A replica whose pipeline stages are on two hosts, which are network namespaces joined by veth."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.client import Generation
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.registry import load_model
from pdserve.process import ChildProcess, is_running, list_descendants, spawn
from pdserve.rpc.v1 import inference_pb2
from tests.support.cluster import (
    TEST_ENGINE,
    ClusterHarness,
    HarnessClient,
    running_cluster,
    wait_until,
    wait_until_async,
)
from tests.support.generation import generate, make_request, make_runner
from tests.support.listeners import listeners_of
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.net_namespace import NetNamespace, net_namespace, running_redis
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_one_end

pytestmark = pytest.mark.timeout(180)

TOKEN = "a-token-of-this-test-alone"
CLUSTER = "two-hosts"
SILENCE_S = 3.0
NUM_TOKENS = 24
PROMPTS = tuple(
    tuple((13 * index + seed) % 350 + 10 for index in range(length))
    for seed, length in enumerate((7, 130, 201))
)


@pytest.fixture(scope="module")
def runner(tiny_llama_folder: Path) -> ModelRunner:  # noqa: F811
    engine = EngineConfig(model=str(tiny_llama_folder), max_model_len=1024)
    return make_runner(load_model(tiny_llama_folder, engine), engine)


def expected_tokens(runner: ModelRunner, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return generate(runner, make_request(prompt), num_tokens, range(32))


@pytest.fixture(scope="module")
def host() -> Iterator[NetNamespace]:
    with net_namespace() as found:
        yield found


@pytest.fixture(scope="module")
def slow_hosts(
    tiny_llama_folder: Path,  # noqa: F811
    host: NetNamespace,
) -> Iterator["TwoHosts"]:
    """A cluster whose replica comes back from all that is done to it."""
    slow = FaultConfig(step_delay_s=0.02)
    with two_hosts(tiny_llama_folder, host, decode_faults=slow, frozen_after_s=3.0) as two:
        yield two


class TwoHosts:
    """A cluster on this host, and the second stage of its decode replica on the other one."""

    def __init__(self, harness: ClusterHarness, host: NetNamespace, stage: ChildProcess) -> None:
        self.harness = harness
        self.host = host
        self.stage = stage

    def start_another_stage(self) -> None:
        self.stage = start_stage(self.host, self.harness.cluster.redis_url)

    def far_pids(self) -> list[int]:
        return [self.stage.pid, *list_descendants(self.stage.pid)]

    async def ranks(self, client: HarnessClient) -> list[inference_pb2.RankInfo]:
        return list((await client.loads())["decode-0"].ranks)

    async def wait_return(self, client: HarnessClient, incarnation: int) -> None:
        """Waits until the replica serves under another incarnation."""

        async def is_back() -> bool:
            worker = (await client.loads()).get("decode-0")
            return worker is not None and worker.incarnation != incarnation

        await wait_until_async(is_back, 60.0, "the replica is back")
        self.harness.wait_all_registered()


@contextmanager
def two_hosts(
    folder: Path, host: NetNamespace, *, tensor: int = 1, **changes: object
) -> Iterator[TwoHosts]:
    with running_redis(host.near) as url:
        stage = start_stage(host, url)
        two: TwoHosts | None = None
        try:
            with running_cluster(
                folder,
                name=CLUSTER,
                host=host.near,
                redis_url=url,
                engine=replace(TEST_ENGINE, model=str(folder)),
                decode_tensor_parallel=tensor,
                decode_pipeline_parallel=2,
                spread_stages=True,
                stage_token=TOKEN,
                stage_silence_s=SILENCE_S,
                **changes,
            ) as harness:
                two = TwoHosts(harness, host, stage)
                yield two
        finally:
            (stage if two is None else two.stage).stop(5.0)


def start_stage(host: NetNamespace, url: str, *flags: str, token: str = TOKEN) -> ChildProcess:
    argv = [sys.executable, "-m", "launcher.cli", "stage", "--worker-id", "decode-0"]
    argv += ["--stage", "1", "--host", host.far, "--cluster", CLUSTER, *flags]
    environment = {"PDSERVE_REDIS": url, "PDSERVE_STAGE_TOKEN": token}
    return spawn(host.wrap(argv), env=environment, name="stage")


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.soak), 2])
async def test_TOK_stages_on_two_hosts_give_the_tokens_of_one_rank(
    tiny_llama_folder: Path,  # noqa: F811
    runner: ModelRunner,
    host: NetNamespace,
    tensor: int,
) -> None:
    with two_hosts(tiny_llama_folder, host, tensor=tensor) as two:
        async with two.harness.connect() as client:
            for prompt in PROMPTS:
                found = await client.generate(
                    prompt_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                )
                assert list(found.token_ids) == expected_tokens(runner, prompt, NUM_TOKENS)
                assert_one_end(found)
                assert_not_recomputed(found)
            await assert_ledger(client, num_workers=2)
            ranks = await two.ranks(client)
        where = [(rank.rank, rank.stage, rank.node) for rank in ranks]
        nodes = [host.near] * tensor + [host.far] * tensor
        assert where == [(rank, rank // tensor, node) for rank, node in enumerate(nodes)]
        far = two.far_pids()
        assert {rank.pid for rank in ranks if rank.node == host.far} < set(far)
        # Named addresses alone, on both hosts.
        assert two.host.listening() == {host.far}
        assert {found.host for found in listeners_of(two.harness.cluster.pids())} == {host.near}
    wait_until(lambda: not any(is_running(pid) for pid in far), 10.0)


@pytest.mark.parametrize("victim", [pytest.param("rank", marks=pytest.mark.soak), "holder"])
async def test_A15_a_killed_stage_on_the_other_host_restarts_its_replica_and_changes_no_token(
    slow_hosts: TwoHosts,
    runner: ModelRunner,
    victim: str,
) -> None:
    prompt, num_tokens = PROMPTS[1], 48
    async with slow_hosts.harness.connect() as client:
        killed: list[inference_pb2.WorkerInfo] = []

        async def kill_after_eight(generation: Generation) -> None:
            if len(generation.token_ids) >= 8 and not killed:
                killed.append((await client.loads())["decode-0"])
                pid = killed[0].ranks[1].pid if victim == "rank" else slow_hosts.stage.pid
                os.kill(pid, signal.SIGKILL)
                if victim == "holder":
                    slow_hosts.start_another_stage()

        found = await client.generate(
            prompt_ids=prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            on_message=kill_after_eight,
        )
        assert killed, "the request was over too soon"
        assert list(found.token_ids) == expected_tokens(runner, prompt, num_tokens)
        assert_one_end(found)
        await slow_hosts.wait_return(client, killed[0].incarnation)
        wait_until(lambda: not any(is_running(rank.pid) for rank in killed[0].ranks), 10.0)
        await assert_ledger(client, num_workers=2)
        ranks = await slow_hosts.ranks(client)
        assert [rank.node for rank in ranks] == [slow_hosts.host.near, slow_hosts.host.far]


async def test_C3_a_cut_cable_is_noticed_on_both_hosts_and_the_replica_returns_with_it(
    slow_hosts: TwoHosts,
    runner: ModelRunner,
) -> None:
    async with slow_hosts.harness.connect() as client:
        before = (await client.loads())["decode-0"]
        slow_hosts.host.cut()
        cut_s = time.monotonic()
        pids = [rank.pid for rank in before.ranks]
        wait_until(lambda: not any(is_running(pid) for pid in pids), 30.0)
        assert time.monotonic() - cut_s > SILENCE_S / 2, "they did not die of the cut"
        slow_hosts.host.mend()
        await slow_hosts.wait_return(client, before.incarnation)
        found = await client.generate(
            prompt_ids=PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        assert list(found.token_ids) == expected_tokens(runner, PROMPTS[0], NUM_TOKENS)


async def test_C9_a_frozen_rank_on_the_other_host_is_noticed_and_changes_no_token(
    slow_hosts: TwoHosts,
    runner: ModelRunner,
) -> None:
    async with slow_hosts.harness.connect() as client:
        frozen: list[inference_pb2.WorkerInfo] = []

        async def freeze_after_eight(generation: Generation) -> None:
            if len(generation.token_ids) >= 8 and not frozen:
                frozen.append((await client.loads())["decode-0"])
                os.kill(frozen[0].ranks[1].pid, signal.SIGSTOP)

        found = await client.generate(
            prompt_ids=PROMPTS[1],
            max_tokens=40,
            temperature=0.0,
            ignore_eos=True,
            on_message=freeze_after_eight,
        )
        assert frozen, "the request was over too soon"
        assert list(found.token_ids) == expected_tokens(runner, PROMPTS[1], 40)
        await slow_hosts.wait_return(client, frozen[0].incarnation)
        wait_until(lambda: not any(is_running(rank.pid) for rank in frozen[0].ranks), 10.0)


@pytest.mark.soak
async def test_C15_a_stage_that_is_told_to_end_lets_its_replica_drain_and_another_takes_over(
    slow_hosts: TwoHosts,
    runner: ModelRunner,
) -> None:
    async with slow_hosts.harness.connect() as client:
        before = (await client.loads())["decode-0"]

        def stop_after_eight(generation: Generation) -> None:
            if len(generation.token_ids) == 8:
                slow_hosts.stage.terminate()

        found = await client.generate(
            prompt_ids=PROMPTS[1],
            max_tokens=40,
            temperature=0.0,
            ignore_eos=True,
            on_message=stop_after_eight,
        )
        assert list(found.token_ids) == expected_tokens(runner, PROMPTS[1], 40)
        assert found.timeline is not None
        assert found.timeline.attempts == 1
        wait_until(lambda: slow_hosts.stage.poll() == 0, 20.0)
        slow_hosts.start_another_stage()
        await slow_hosts.wait_return(client, before.incarnation)
        await assert_ledger(client, num_workers=2)
