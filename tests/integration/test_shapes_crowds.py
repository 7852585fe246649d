"""Replicas of several ranks in real processes, with more requests at once than they have seats."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.client import Generation
from pdserve.config.engine import EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.registry import load_model
from tests.support.cluster import TEST_ENGINE, ClusterHarness, HarnessClient, running_cluster
from tests.support.generation import generate, make_request, make_runner
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_one_end

NUM_TOKENS = 16
MAX_STALL_S = 5.0


def draw_prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    return [
        tuple(numbers.randrange(3, 380) for _ in range(numbers.randint(17, 90)))
        for _ in range(count)
    ]


@contextmanager
def cluster_of(
    folder: Path, prefill: tuple[int, int], decode: tuple[int, int], max_num_seqs: int
) -> Iterator[ClusterHarness]:
    """Starts one replica a pool, of so many (tensor, stages) each."""
    engine = replace(
        TEST_ENGINE,
        model=str(folder),
        max_num_seqs=max_num_seqs,
        tensor_parallel=prefill[0],
        pipeline_parallel=prefill[1],
    )
    with running_cluster(
        folder,
        engine=engine,
        decode_tensor_parallel=decode[0],
        decode_pipeline_parallel=decode[1],
        max_local_prefill_tokens=0,
    ) as harness:
        yield harness


async def time_tokens(
    client: HarnessClient, prompt: Sequence[int]
) -> tuple[Generation, list[float]]:
    """Runs a request; returns also when each of its messages came."""
    times_s: list[float] = []
    found = await client.generate(
        prompt_ids=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        on_message=lambda _: times_s.append(time.monotonic()),
    )
    return found, times_s


@pytest.fixture(scope="module")
def runner(tiny_llama_folder: Path) -> ModelRunner:  # noqa: F811
    engine = EngineConfig(model=str(tiny_llama_folder), max_model_len=1024)
    return make_runner(load_model(tiny_llama_folder, engine), engine)


async def serve_at_once(
    client: HarnessClient, prompts: list[tuple[int, ...]], runner: ModelRunner
) -> list[float]:
    """Runs all prompts at once, checks them, and returns when any message came, in order."""
    found = await asyncio.gather(*(time_tokens(client, prompt) for prompt in prompts))
    for prompt, (generation, _) in zip(prompts, found, strict=True):
        expected = generate(runner, make_request(prompt), NUM_TOKENS, range(32))
        assert list(generation.token_ids) == expected
        assert_one_end(generation)
        assert_not_recomputed(generation)
    return sorted(at_s for _, times_s in found for at_s in times_s)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("prefill", "decode"), [((1, 2), (2, 1)), ((2, 1), (1, 2))], ids=["1x2-2x1", "2x1-1x2"]
)
async def test_A16_unlike_shapes_in_processes_serve_128_requests_at_once(
    tiny_llama_folder: Path,  # noqa: F811
    runner: ModelRunner,
    prefill: tuple[int, int],
    decode: tuple[int, int],
) -> None:
    """Rounds in place of ten minutes: two cores serve one in some seconds."""
    with cluster_of(tiny_llama_folder, prefill, decode, 128) as harness:
        async with harness.connect() as client:
            for seed in range(3):
                await serve_at_once(client, draw_prompts(128, seed), runner)
            await assert_ledger(client, num_workers=2)


@pytest.mark.soak
async def test_C5_two_tensor_ranks_in_processes_never_stall_while_kv_comes(
    tiny_llama_folder: Path,  # noqa: F811
    runner: ModelRunner,
) -> None:
    """A batch of four is full while 60 others are handed off: sums and frames at once."""
    with cluster_of(tiny_llama_folder, (1, 1), (2, 1), 4) as harness:
        async with harness.connect() as client:
            times_s = await serve_at_once(client, draw_prompts(64, 7), runner)
            assert max(after - before for before, after in pairwise(times_s)) < MAX_STALL_S
            await assert_ledger(client, num_workers=2)
