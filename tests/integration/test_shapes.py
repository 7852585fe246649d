"""Replicas of several ranks, in real processes: same tokens, any shape to any, dead as one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.client import Generation
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import ConfigError
from pdserve.models.registry import load_model
from pdserve.process import is_running
from pdserve.registry.base import WorkerRecord
from tests.support.cluster import (
    TEST_ENGINE,
    ClusterHarness,
    running_cluster,
    wait_until,
    wait_until_async,
)
from tests.support.generation import generate, make_request, make_runner
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_one_end
from tests.support.tiny_models import make_tiny_llama

PROMPTS = tuple(
    tuple((13 * index + seed) % 350 + 10 for index in range(length))
    for seed, length in enumerate((7, 64, 130, 201))
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def runner(tiny_llama_folder: Path) -> ModelRunner:  # noqa: F811
    engine = EngineConfig(model=str(tiny_llama_folder), max_model_len=1024)
    return make_runner(load_model(tiny_llama_folder, engine), engine)


def expected_tokens(runner: ModelRunner, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return generate(runner, make_request(prompt), num_tokens, range(32))


def shape_of(tensor: int, stages: int, decode_tensor: int, decode_stages: int) -> dict[str, object]:
    engine = replace(TEST_ENGINE, tensor_parallel=tensor, pipeline_parallel=stages)
    return {
        "engine": engine,
        "decode_tensor_parallel": decode_tensor,
        "decode_pipeline_parallel": decode_stages,
    }


@contextmanager
def cluster_of(
    folder: Path, shape: dict[str, object], **changes: object
) -> Iterator[ClusterHarness]:
    engine = shape["engine"]
    assert isinstance(engine, EngineConfig)
    shape = {**shape, "engine": replace(engine, model=str(folder))}
    with running_cluster(folder, **shape, **changes) as harness:
        yield harness


@pytest.fixture(scope="module")
def wide(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    """Tensor ranks and stages at once: prefill of four ranks, decode of two stages."""
    with cluster_of(tiny_llama_folder, shape_of(2, 2, 1, 2)) as harness:
        yield harness


@pytest.mark.soak
async def test_A15_TOK_kv_of_stages_of_two_ranks_decodes_on_stages_of_one(
    wide: ClusterHarness, runner: ModelRunner
) -> None:
    await assert_same_tokens(wide, runner, [4, 2])


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 1),
        pytest.param((1, 1, 2, 2), marks=pytest.mark.soak),
        pytest.param((2, 1, 1, 1), marks=pytest.mark.soak),
    ],
    ids=["1x2-2x1", "1x1-2x2", "2x1-1x1"],
)
async def test_A15_TOK_kv_of_one_shape_decodes_in_another(
    tiny_llama_folder: Path,  # noqa: F811
    runner: ModelRunner,
    shape: tuple[int, int, int, int],
) -> None:
    with cluster_of(tiny_llama_folder, shape_of(*shape)) as harness:
        await assert_same_tokens(harness, runner, [shape[0] * shape[1], shape[2] * shape[3]])


@pytest.mark.soak
async def test_A15_TOK_three_tensor_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model", hidden=144, heads=9, kv_heads=3)
    engine = EngineConfig(model=str(folder), max_model_len=1024)
    runner = make_runner(load_model(folder, engine), engine)
    with cluster_of(folder, shape_of(3, 1, 1, 1)) as harness:
        await assert_same_tokens(harness, runner, [3, 1])


async def assert_same_tokens(
    harness: ClusterHarness, runner: ModelRunner, num_ranks: list[int]
) -> None:
    async with harness.connect() as client:
        for prompt in PROMPTS:
            found = await client.generate(
                prompt_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
            assert list(found.token_ids) == expected_tokens(runner, prompt, NUM_TOKENS)
            assert_one_end(found)
            assert_not_recomputed(found)
        await assert_ledger(client, num_workers=2)
    records = [member.record for member in harness.cluster.members()]
    assert [len(record.rank_pids) for record in records if record is not None] == num_ranks


async def test_A13_A14_samples_penalties_and_prompt_logprobs_on_ranks_equal_one_rank(
    tiny_llama_folder: Path,  # noqa: F811
    wide: ClusterHarness,
) -> None:
    requests = [
        {"prompt_ids": PROMPTS[2], "n": 4, "temperature": 0.9, "seed": 5, "max_tokens": NUM_TOKENS}
        | {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
        | {"ignore_eos": True, "logit_bias": {40: 1.5}},
        {"prompt_ids": PROMPTS[3], "temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
        | {"prompt_logprobs": 5, "logprobs": 5, "echo": True},
    ]
    found: list[list[Generation]] = []
    with cluster_of(tiny_llama_folder, shape_of(1, 1, 1, 1), num_prefill=0) as single:
        for harness, num_workers in ((wide, 2), (single, 1)):
            async with harness.connect() as client:
                found.append([await client.generate(**request) for request in requests])
                await assert_ledger(client, num_workers=num_workers)
    for on_ranks, alone in zip(*found, strict=True):
        assert_one_end(on_ranks)
        assert_not_recomputed(on_ranks)
        assert tokens_of(on_ranks) == tokens_of(alone)
        assert on_ranks.prompt_logprobs == alone.prompt_logprobs
        assert on_ranks.logprobs == alone.logprobs
    samples, scored = found[0]
    assert len({tuple(ids) for ids in tokens_of(samples).values()}) == 4
    assert len(scored.prompt_logprobs) == len(PROMPTS[3]) - 1


def tokens_of(generation: Generation) -> dict[int, list[int]]:
    return {index: sample.token_ids for index, sample in generation.samples.items()}


async def test_A15_the_death_of_one_rank_is_the_death_of_its_replica_and_changes_no_token(
    tiny_llama_folder: Path,  # noqa: F811
    runner: ModelRunner,
) -> None:
    slow = FaultConfig(step_delay_s=0.02)
    prompt, num_tokens = PROMPTS[2], 48
    with cluster_of(
        tiny_llama_folder, shape_of(1, 1, 2, 1), num_decode=2, decode_faults=slow
    ) as harness:
        async with harness.connect() as client:
            killed: list[WorkerRecord] = []

            async def kill_rank_1_after_eight(generation: Generation) -> None:
                if len(generation.token_ids) >= 8 and not killed:
                    worker_id = await client.busy_worker("decode")
                    record = harness.cluster.member(worker_id).record
                    assert record is not None
                    os.kill(record.rank_pids[1], signal.SIGKILL)
                    killed.append(record)

            found = await client.generate(
                prompt_ids=prompt,
                max_tokens=num_tokens,
                temperature=0.0,
                ignore_eos=True,
                on_message=kill_rank_1_after_eight,
            )
            assert killed, "the request was over too soon"
            assert list(found.token_ids) == expected_tokens(runner, prompt, num_tokens)
            assert_one_end(found)
            assert found.timeline is not None
            assert found.timeline.attempts == 2
            old = killed[0]
            pids = (*old.rank_pids, old.face_pid)
            wait_until(lambda: not any(is_running(pid) for pid in pids), 10.0)

            async def has_come_back() -> bool:
                workers = await client.loads()
                return len(workers) == 3 and workers[old.worker_id].incarnation != old.incarnation

            await wait_until_async(has_come_back, 60.0, "the replica came back")
            await assert_ledger(client, num_workers=3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (3, 1, 1, 1),
            "--tensor-parallel-size must divide the 2 KV heads or be a multiple of them, got 3",
        ),
        ((1, 9, 1, 1), "--pipeline-parallel-size must be at most the 2 layers, got 9"),
    ],
)
def test_A17_impossible_numbers_of_ranks_are_refused_by_the_name_of_their_field(
    tiny_llama_folder: Path,  # noqa: F811
    shape: tuple[int, int, int, int],
    message: str,
) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        cluster_of(tiny_llama_folder, shape_of(*shape)),
    ):
        raise AssertionError("it started")
