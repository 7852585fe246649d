"""On a real cluster: a request's time is accounted for, and the predictor learns real steps."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.rpc.v1 import inference_pb2
from tests.support.cluster import ClusterHarness, HarnessClient, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401

PARTS = ["router", "retries", "queue", "prefill", "delivery"]


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    with running_cluster(tiny_llama_folder, num_prefill=2, num_decode=1) as harness:
        yield harness


async def _explain(client: HarnessClient, request_id: str) -> inference_pb2.ExplainResponse:
    return await client.stub.Explain(inference_pb2.ExplainRequest(request_id=request_id), timeout=5)


async def test_the_parts_of_the_critical_path_sum_to_the_observed_ttft(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        for number in range(5):
            prompt = tuple(range(10 + number, 300 + number))
            found = await client.generate(
                prompt_ids=prompt, max_tokens=4, request_id=f"path-{number}", ignore_eos=True
            )
            explained = await _explain(client, f"path-{number}")
            assert found.timeline is not None
            assert explained.ttft_s == pytest.approx(found.timeline.ttft_s, abs=1e-9)
            assert [part.name for part in explained.critical_path] == PARTS
            parts = {part.name: part.seconds for part in explained.critical_path}
            assert sum(parts.values()) == pytest.approx(explained.ttft_s, abs=1e-6)
            assert min(parts.values()) >= 0
            assert parts["prefill"] > 0
            assert parts["retries"] == 0


async def test_costs_turn_into_seconds_once_real_steps_were_seen(cluster: ClusterHarness) -> None:
    async with cluster.connect() as client:
        unit, number = "blocks", 0
        async with asyncio.timeout(90):
            while unit != "seconds":
                number += 1
                prompt = tuple((7 * number + i) % 200 + 5 for i in range(40 + number % 150))
                await client.generate(
                    prompt_ids=prompt, max_tokens=8, request_id=f"fit-{number}", ignore_eos=True
                )
                explained = await _explain(client, f"fit-{number}")
                unit = explained.placements[-1].unit
        assert explained.expected_ttft_s > 0
        chosen = explained.placements[-1].candidates[0]
        assert 0 < chosen.prefill < 1
        assert 0 < chosen.step < 1
        assert len(explained.placements[-1].candidates) == 2


async def test_the_command_shows_the_table(cluster: ClusterHarness) -> None:
    async with cluster.connect() as client:
        await client.generate(prompt_ids=(5, 6, 7), max_tokens=2, request_id="shown")
    command = [sys.executable, "-m", "launcher.cli", "explain", "shown"]
    command += ["--address", cluster.cluster.address]
    text = await asyncio.to_thread(
        lambda: subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    assert "first token after" in text
    assert "prefill" in text
    as_json = await asyncio.to_thread(
        lambda: (
            subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
        )
    )
    assert json.loads(as_json)["request_id"] == "shown"
