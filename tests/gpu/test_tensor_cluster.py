"""A replica of two tensor ranks on two GPUs, as real processes behind a face."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.client import Generation
from tests.gpu.test_cluster import ENGINE, NUM_TOKENS, PROMPTS, tokens_of
from tests.support.cluster import ClusterHarness, HarnessClient, running_cluster
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny256")
    return make_tiny(
        path, "llama", hidden=256, heads=4, kv_heads=2, intermediate=512, max_position=2048
    )


def serve(folder: Path, num_ranks: int, run: Callable[[ClusterHarness], None]) -> None:
    # float32: sums of two halves round otherwise, and greedy tokens must be the same.
    engine = replace(
        ENGINE,
        model=str(folder),
        dtype="float32",
        deterministic=False,
        tensor_parallel=num_ranks,
    )
    with running_cluster(
        folder, engine=engine, num_prefill=0, num_decode=1, ready_timeout_s=240.0
    ) as harness:
        run(harness)


async def generate(client: HarnessClient, prompt: list[int], **extra: object) -> Generation:
    return await client.generate(
        prompt_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **extra
    )


async def all_tokens(harness: ClusterHarness) -> list[list[int]]:
    async with harness.connect() as client:
        found = await asyncio.gather(*(generate(client, prompt) for prompt in PROMPTS))
    return [tokens_of(one) for one in found]


async def tokens_with_a_kill(harness: ClusterHarness) -> Generation:
    """Kills the rank that is not the first in mid-stream."""
    async with harness.connect() as client:
        was_killed = False

        async def kill_once(found: Generation) -> None:
            nonlocal was_killed
            if was_killed or len(found.token_ids) < 6:
                return
            was_killed = True
            record = harness.cluster.member("decode-0").record
            assert record is not None
            assert len(record.rank_pids) == 2
            os.kill(record.rank_pids[1], signal.SIGKILL)

        found = await generate(client, PROMPTS[2], on_message=kill_once)
        assert was_killed
        return found


def test_TOK_B9_ranks_give_one_gpus_tokens_and_the_kill_of_one_costs_none(folder: Path) -> None:
    made: dict[int, list[list[int]]] = {}
    cut: list[Generation] = []

    def run_alone(harness: ClusterHarness) -> None:
        made[1] = asyncio.run(all_tokens(harness))

    def run_ranks(harness: ClusterHarness) -> None:
        made[2] = asyncio.run(all_tokens(harness))
        # The replica dies as one and is started again; the stream waits for it.
        cut.append(asyncio.run(tokens_with_a_kill(harness)))

    serve(folder, 2, run_ranks)
    serve(folder, 1, run_alone)
    assert made[2] == made[1]
    assert tokens_of(cut[0]) == made[1][2]
    assert cut[0].timeline is not None
    assert cut[0].timeline.attempts == 2
