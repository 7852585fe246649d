"""Both pools in two stages each over the same two GPUs, as real processes behind their faces."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.client import Generation
from tests.gpu.test_cluster import (
    ENGINE,
    PROMPTS,
    all_tokens,
    generate,
    num_handoffs,
    tokens_of,
)
from tests.support.cluster import ClusterHarness, running_cluster, wait_until
from tests.support.oracles import assert_ledger
from tests.support.tiny_models import make_tiny

READY_TIMEOUT_S = 240.0

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny256")
    return make_tiny(
        path, "llama", hidden=256, heads=4, kv_heads=2, intermediate=512, max_position=2048
    )


async def tokens_with_a_kill(harness: ClusterHarness) -> Generation:
    """Kills the last stage of the decode replica in mid-stream."""
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
        await assert_ledger(client, num_workers=2)
        return found


def test_TOK_B9_stages_give_one_gpus_tokens_and_the_kill_of_one_costs_none(folder: Path) -> None:
    one = replace(ENGINE, model=str(folder))
    with running_cluster(
        folder, engine=one, num_prefill=0, num_decode=1, ready_timeout_s=READY_TIMEOUT_S
    ) as harness:
        expected = asyncio.run(all_tokens(harness))
    with running_cluster(
        folder,
        engine=replace(one, pipeline_parallel=2),
        num_prefill=1,
        num_decode=1,
        # A hand-off that fails must not be mended by computing the prompt again.
        max_local_prefill_tokens=0,
        ready_timeout_s=READY_TIMEOUT_S,
    ) as harness:
        assert asyncio.run(all_tokens(harness)) == expected
        wait_until(lambda: num_handoffs(harness) == len(PROMPTS), 10.0)
        figures = harness.scrape_worker("decode-0")
        assert figures["pdserve_recomputed_prompt_tokens_total"] == 0
        # The replica dies as one and is started again; the stream waits for it.
        cut = asyncio.run(tokens_with_a_kill(harness))
    assert cut.timeline is not None
    assert cut.timeline.attempts == 2
    # What was made before the kill is computed again by the prompt's kernel: its last bit may
    # differ from there on, in bfloat16.
    assert tokens_of(cut)[:6] == expected[2][:6]
    assert len(tokens_of(cut)) == len(expected[2])
