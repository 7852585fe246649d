"""Locust's users against a real cluster on the CPU, as `loadtests/README.md` says to run them."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ClusterHarness, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="locust is missing"),
]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "loadtests" / "headless.conf")
USERS = ["--users", "4", "--spawn-rate", "4", "--output-tokens", "8"]


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    with running_cluster(tiny_llama_folder) as harness:
        yield harness


def run_locust(cluster: ClusterHarness, *flags: str) -> tuple[int, dict[str, float], str]:
    argv = [sys.executable, "-m", "locust", "--config", CONFIG, "--host", cluster.cluster.address]
    done = subprocess.run(
        [*argv, *USERS, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    assert lines, done.stderr[-4000:]
    return done.returncode, json.loads(lines[-1]), done.stderr


LENIENT = ["--slo-ttft-ms", "20000", "--slo-tpot-ms", "5000", "--min-requests", "8"]


def test_twenty_seconds_of_chat_are_counted_as_the_router_counts_them(
    cluster: ClusterHarness,
) -> None:
    before = cluster.scrape().get("pdserve_requests_total", 0.0)
    status, figures, errors = run_locust(cluster, *LENIENT, "--run-time", "20s")
    assert status == 0, errors[-4000:]
    assert figures["failures"] == 0
    assert figures["good"] == figures["requests"] >= 8
    assert figures["itl_p50_ms"] > 0
    assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]
    assert cluster.scrape()["pdserve_requests_total"] - before == figures["requests"]


@pytest.mark.parametrize("scenario", ["long-document", "shared-prompt", "agent-tree", "bursts"])
def test_each_scenario_runs_without_a_failure(cluster: ClusterHarness, scenario: str) -> None:
    flags = ["--scenario", scenario, "--run-time", "6s", "--min-requests", "1"]
    status, figures, errors = run_locust(cluster, *LENIENT, *flags)
    assert status == 0, errors[-4000:]
    assert figures["requests"] >= 1
    assert figures["failures"] == 0


def test_a_trace_is_replayed_whole_at_its_own_times(
    cluster: ClusterHarness, tmp_path: Path
) -> None:
    lines = [
        {"timestamp": 100 * i, "input_length": 900, "output_length": 40, "hash_ids": [0, i + 1]}
        for i in range(12)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    hits = cluster.scrape_worker("prefill-0")["vllm:prefix_cache_hits_total"]
    flags = ["--scenario", "trace", "--trace", str(trace), "--trace-scale", "0.2"]
    status, figures, errors = run_locust(cluster, *LENIENT, *flags, "--run-time", "6s")
    assert status == 0, errors[-4000:]
    assert figures["requests"] == len(lines)
    # 102 tokens of each prompt are those of its first block, which all have in common.
    gained = cluster.scrape_worker("prefill-0")["vllm:prefix_cache_hits_total"] - hits
    assert gained >= 96 * (len(lines) // 2)


def test_a_threshold_that_is_missed_fails_the_run_and_is_named(cluster: ClusterHarness) -> None:
    flags = ["--slo-ttft-ms", "0.001", "--run-time", "6s", "--min-requests", "1"]
    status, figures, errors = run_locust(cluster, *flags)
    assert status == 1
    assert figures["good"] == 0
    assert figures["failures"] == 0
    assert "missed: 0.0% of requests were good, below 95.0%" in errors


def test_a_router_that_is_not_there_fails_the_run(cluster: ClusterHarness) -> None:
    flags = ["--host", "127.0.0.1:1", "--run-time", "3s", "--stop-timeout", "1s"]
    status, figures, errors = run_locust(cluster, *flags)
    assert status == 1
    assert figures["requests"] == 0
    assert "missed: 0 requests, fewer than 20" in errors
