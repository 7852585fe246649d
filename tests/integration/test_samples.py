"""Several samples, penalties and prompt log-probabilities in a real cluster, workers killed too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.client import Generation
from pdserve.config.worker import FaultConfig
from tests.support.cluster import ClusterHarness, make_request, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_one_end

PROMPT = tuple(range(10, 115))
REQUEST = {
    "prompt_ids": PROMPT,
    "max_tokens": 48,
    "temperature": 0.9,
    "seed": 5,
    "ignore_eos": True,
    "presence_penalty": 0.8,
    "repetition_penalty": 1.1,
    "min_p": 0.01,
    "logit_bias": {40: 1.5},
}


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    # Slow steps: the tiny model would be done before anybody could be killed.
    slow = FaultConfig(step_delay_s=0.03)
    with running_cluster(
        tiny_llama_folder,
        num_prefill=2,
        num_decode=2,
        decode_faults=slow,
        prefill_faults=FaultConfig(step_delay_s=0.5),
    ) as harness:
        yield harness


@pytest.fixture(scope="module")
def colocated(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    with running_cluster(tiny_llama_folder, num_prefill=0, num_decode=1) as harness:
        yield harness


def outputs(generation: Generation) -> dict[int, list[int]]:
    return {index: sample.token_ids for index, sample in generation.samples.items()}


@pytest.mark.parametrize("n", [2, 4, 8])
async def test_A13_n_samples_are_complete_and_equal_the_single_worker_run(
    cluster: ClusterHarness, colocated: ClusterHarness, n: int
) -> None:
    async with cluster.connect() as client, colocated.connect() as single:
        found = await client.generate(**REQUEST, n=n)
        assert_one_end(found)
        assert_not_recomputed(found)
        assert sorted(found.samples) == list(range(n))
        assert len({tuple(ids) for ids in outputs(found).values()}) == n
        assert found.usage is not None
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (105, 48 * n)
        assert found.timeline is not None
        assert found.timeline.kv_blocks_shipped <= 7
        expected = await single.generate(**REQUEST, n=n)
        assert outputs(found) == outputs(expected)
        alone = await single.generate(**REQUEST)
        assert found.token_ids == alone.token_ids
        await assert_ledger(client, num_workers=4)


async def test_C14_a_killed_decode_worker_changes_no_token_of_any_sample(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        expected = await client.generate(**REQUEST, n=4)
        await client.wait_idle()
        killed: list[str] = []

        async def kill_after_eight(generation: Generation) -> None:
            lengths = [len(sample.token_ids) for sample in generation.samples.values()]
            if not killed and len(lengths) == 4 and min(lengths) >= 8:
                killed.append(await client.busy_worker("decode"))
                cluster.cluster.kill(killed[0])

        found = await client.generate(**REQUEST, n=4, on_message=kill_after_eight)
        assert killed
        assert outputs(found) == outputs(expected)
        assert_one_end(found)
        assert found.timeline is not None
        assert found.timeline.attempts == 2
        cluster.wait_all_registered()
        await assert_ledger(client, num_workers=4)


async def test_C1_a_killed_prefill_worker_changes_no_token_of_any_sample(
    cluster: ClusterHarness, colocated: ClusterHarness
) -> None:
    # Three slow chunks: long enough to be seen at work.
    request = make_request(**{**REQUEST, "prompt_ids": tuple(range(300, 3, -1)) * 2}, n=4)
    async with cluster.connect() as client, colocated.connect() as single:
        expected = await single.generate(request)
        await client.wait_idle()
        call = client.start(request)
        cluster.cluster.kill(await client.busy_worker("prefill"))
        found = Generation()
        async for response in call:
            found.add(response)
        assert outputs(found) == outputs(expected)
        assert_one_end(found)
        assert found.timeline is not None
        assert found.timeline.attempts == 2
        cluster.wait_all_registered()
        await assert_ledger(client, num_workers=4)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
async def test_A14_prompt_logprobs_and_echo_equal_the_single_worker_run(
    cluster: ClusterHarness, colocated: ClusterHarness, num_top: int
) -> None:
    request = {
        "prompt_ids": (*PROMPT, *range(50, 350)),
        "max_tokens": 4,
        "temperature": 0.0,
        "logprobs": num_top,
        "prompt_logprobs": num_top,
        "echo": True,
    }
    async with cluster.connect() as client, colocated.connect() as single:
        found = await client.generate(**request)
        expected = await single.generate(**request)
    assert_one_end(found)
    assert found.prompt_ids == list(request["prompt_ids"])
    assert [one.token_id for one in found.prompt_logprobs] == found.prompt_ids[1:]
    assert all(len(one.top) == num_top for one in found.prompt_logprobs)
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert (found.prompt_text, found.logprobs) == (expected.prompt_text, expected.logprobs)
    assert found.token_ids == expected.token_ids


async def test_a_stop_string_ends_one_sample_and_leaves_the_others(
    cluster: ClusterHarness,
) -> None:
    cluster.wait_all_registered()
    async with cluster.connect() as client:
        free = await client.generate(**REQUEST, n=3)
        stop = free.samples[1].text[6:9]
        found = await client.generate(**REQUEST, n=3, stop=[stop])
        assert_one_end(found)
        stopped = found.samples[1]
        assert stopped.finish is not None
        assert stopped.finish.stop_string == stop
        assert len(stopped.token_ids) < 48
        for index in (0, 2):
            if stop not in free.samples[index].text:
                assert found.samples[index].token_ids == free.samples[index].token_ids
        await assert_ledger(client, num_workers=4)
