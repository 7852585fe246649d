"""HTTP, keys and tenants against a real tiny cluster: real caches, a real hand-off, a real SDK."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from launcher.client import Generation
from pdserve.rpc.v1 import types_pb2
from tests.support.cluster import ClusterHarness, make_request, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"alice": "key-a", "bob": "key-b"}
PROMPT = list(range(10, 138))


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    keys = tuple(f"{name}={key}" for name, key in KEYS.items())
    with running_cluster(tiny_llama_folder, api_keys=keys) as harness:
        yield harness


@pytest.fixture
def sdk(cluster: ClusterHarness) -> Iterator[OpenAI]:
    url = f"http://{cluster.cluster.http_address}/v1"
    with OpenAI(api_key=KEYS["alice"], base_url=url, max_retries=0) as client:
        yield client


def test_http_streams_the_tokens_that_it_answers_whole(sdk: OpenAI) -> None:
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 3}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = sdk.completions.create(**request, extra_body=extra)
    stream = sdk.completions.create(**request, extra_body=extra, stream=True)
    ids = [i for chunk in stream for i in getattr(chunk.choices[0], "token_ids", ())]
    assert len(ids) == 12
    assert ids == whole.choices[0].token_ids


async def test_A14_http_tells_of_the_prompt_what_grpc_tells(
    cluster: ClusterHarness, sdk: OpenAI
) -> None:
    request = make_request(
        prompt_ids=PROMPT, max_tokens=4, temperature=0.0, echo=True, logprobs=1, prompt_logprobs=1
    )
    metadata = (("authorization", f"Bearer {KEYS['alice']}"),)
    told = Generation()
    async with cluster.connect() as client:
        async for message in client.stub.Generate(request, timeout=30, metadata=metadata):
            told.add(message)
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
    found = sdk.completions.create(**fields, echo=True, logprobs=1).choices[0]
    assert found.text == told.prompt_text + told.text
    assert found.logprobs is not None
    scores = found.logprobs.token_logprobs
    assert scores is not None
    assert scores[0] is None
    assert scores[1:] == [one.logprob for one in (*told.prompt_logprobs, *told.logprobs)]


@pytest.mark.parametrize("n", [2, 8])
def test_A13_n_samples_over_http_whole_and_streamed(sdk: OpenAI, n: int) -> None:
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 3, "n": n}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = sdk.completions.create(**request, extra_body=extra)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (128, 6 * n)
    ids: dict[int, list[int]] = {}
    for chunk in sdk.completions.create(**request, extra_body=extra, stream=True):
        choice = chunk.choices[0]
        ids.setdefault(choice.index, []).extend(getattr(choice, "token_ids", ()))
    assert ids == {choice.index: choice.token_ids for choice in whole.choices}
    assert len({tuple(one) for one in ids.values()}) == n


async def test_E6_E7_a_tenant_hits_its_own_cache_and_never_anothers(
    cluster: ClusterHarness,
) -> None:
    async def run(name: str) -> tuple[types_pb2.Usage, types_pb2.Timeline]:
        request = make_request(prompt_ids=range(140, 268), max_tokens=4, temperature=0.0)
        metadata = (("authorization", f"Bearer {KEYS[name]}"),)
        async with cluster.connect() as client:
            call = client.stub.Generate(request, timeout=30, metadata=metadata)
            completion = [message async for message in call][-1].completion
        return completion.usage, completion.timeline

    first, first_times = await run("alice")
    again, again_times = await run("alice")
    other, other_times = await run("bob")
    other_again, _ = await run("bob")
    assert first.cached_tokens == other.cached_tokens == 0
    # Prefill's cache, and decode's: what decode holds is not shipped again.
    assert again.cached_tokens == other_again.cached_tokens > 0
    assert again_times.kv_blocks_shipped < first_times.kv_blocks_shipped
    assert other_times.kv_blocks_shipped == first_times.kv_blocks_shipped


def test_E6_cached_tokens_are_shown_per_cache_salt(sdk: OpenAI) -> None:
    def cached(salt: str) -> int:
        found = sdk.completions.create(
            model="tiny",
            prompt=list(range(30, 130)),
            max_tokens=2,
            extra_body={"cache_salt": salt},
        )
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        return found.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_E4_the_command_line_needs_and_takes_the_key(cluster: ClusterHarness) -> None:
    address = cluster.cluster.address

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher.cli", *argv, "--address", address, "--json"],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    refused = run("generate", "hello", "--max-tokens", "2")
    assert refused.returncode == 1
    assert "an API key is needed" in refused.stderr
    done = run("generate", "hello", "--max-tokens", "2", "--api-key", KEYS["bob"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finish_reason"]
    status = run("status", "--api-key", KEYS["bob"])
    assert {w["role"] for w in json.loads(status.stdout)["workers"]} == {"prefill", "decode"}


def test_metrics_and_health_need_no_key(cluster: ClusterHarness) -> None:
    base = f"http://{cluster.cluster.http_address}"
    with urllib.request.urlopen(f"{base}/health", timeout=10) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:
        assert b"vllm:num_requests_running" in answer.read()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{base}/v1/models", timeout=10)
    refused.value.close()
    assert refused.value.code == 401


def test_no_key_is_on_any_command_line(cluster: ClusterHarness) -> None:
    for pid in cluster.cluster.pids():
        flags = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not any(key.encode() in flags for key in KEYS.values())
