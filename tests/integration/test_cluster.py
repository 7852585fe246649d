"""A whole cluster over a tiny model: the oracles hold, whole and with a replica killed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.client import Generation
from pdserve.config.worker import FaultConfig
from tests.support.cluster import ClusterHarness, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import (
    Canary,
    assert_ledger,
    assert_not_recomputed,
    assert_one_end,
    assert_same_tokens,
)

ROOT = Path(__file__).resolve().parents[2]
PROMPT = tuple(range(10, 110))


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    # Slow steps: the tiny model would be done before anybody could be killed.
    slow = FaultConfig(step_delay_s=0.02)
    with running_cluster(
        tiny_llama_folder, num_prefill=1, num_decode=2, decode_faults=slow
    ) as harness:
        yield harness


async def test_request_is_handed_off_and_ends_once(cluster: ClusterHarness) -> None:
    async with cluster.connect() as client:
        found = await client.generate(
            prompt_ids=PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True
        )
        assert len(found.token_ids) == 12
        assert found.finish_reason == "length"
        assert_one_end(found)
        assert_not_recomputed(found)
        await assert_ledger(client, num_workers=3)


async def test_C14_decode_worker_killed_in_mid_stream_changes_no_token(
    cluster: ClusterHarness,
) -> None:
    request = {"prompt_ids": PROMPT, "max_tokens": 64, "temperature": 0.9, "seed": 5}
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        expected = await client.generate(**request, ignore_eos=True)
        await client.wait_idle()
        killed: list[str] = []

        async def kill_after_eight(generation: Generation) -> None:
            if len(generation.token_ids) >= 8 and not killed:
                killed.append(await client.busy_worker("decode"))
                cluster.cluster.kill(killed[0])

        found = await client.generate(**request, ignore_eos=True, on_message=kill_after_eight)
        assert killed, "the request was over too soon"
        assert_same_tokens(found, expected)
        assert_one_end(found)
        assert found.timeline is not None
        assert found.timeline.attempts == 2
        cluster.wait_all_registered()
        await canary.assert_alive(client, num_expected_restarts=1)
        await assert_ledger(client, num_workers=3)


def run_pdserve(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli", *argv],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_generate_prints_one_json_object(cluster: ClusterHarness) -> None:
    flags = ["--address", cluster.cluster.address, "--max-tokens", "3", "--ignore-eos"]
    done = run_pdserve("generate", "hello", *flags, "--logprobs", "0", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["token_ids"]) == len(found["logprobs"]) == 3
    assert found["finish_reason"] == "length"


def test_generate_streams_the_text_of_the_json_answer(cluster: ClusterHarness) -> None:
    flags = ["--address", cluster.cluster.address, "--max-tokens", "5", "--temperature", "0"]
    as_json = run_pdserve("generate", "hello", *flags, "--json")
    as_text = run_pdserve("generate", "hello", *flags)
    assert as_text.stdout == json.loads(as_json.stdout)["text"] + "\n"


def test_generate_tells_what_the_server_refuses(cluster: ClusterHarness) -> None:
    done = run_pdserve(
        "generate", "hello", "--max-tokens", "0", "--address", cluster.cluster.address
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("pdserve: ")
    assert "--max-tokens must be at least 1" in done.stderr


def test_status_lists_every_worker_with_its_pids(cluster: ClusterHarness) -> None:
    cluster.wait_all_registered()
    done = run_pdserve("status", "--address", cluster.cluster.address, "--json")
    assert done.returncode == 0, done.stderr
    workers = {worker["worker_id"]: worker for worker in json.loads(done.stdout)["workers"]}
    assert set(workers) == {"prefill-0", "decode-0", "decode-1"}
    for member in cluster.cluster.members():
        assert member.record is not None
        assert workers[member.worker_id]["face_pid"] == member.face_pid
        assert workers[member.worker_id]["rank_pids"] == list(member.record.rank_pids)
        ranks = workers[member.worker_id]["ranks"]
        assert [(rank["node"], rank["pid"]) for rank in ranks] == [
            ("127.0.0.1", pid) for pid in member.record.rank_pids
        ]
    table = run_pdserve("status", "--address", cluster.cluster.address)
    assert all(worker_id in table.stdout for worker_id in workers)


def test_metrics_of_router_and_workers_can_be_scraped(cluster: ClusterHarness) -> None:
    cluster.wait_all_registered()
    assert cluster.scrape()
    for member in cluster.cluster.members():
        assert cluster.scrape_worker(member.worker_id)
