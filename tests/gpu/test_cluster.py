"""A whole cluster of real processes whose replicas share one GPU: KV goes from one to the other."""

import asyncio
import os
import signal
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.client import Generation
from pdserve.config.engine import Dtype
from pdserve.config.worker import FaultConfig, HandoffConfig
from tests.support.cluster import (
    TEST_ENGINE,
    TEST_HANDOFF,
    ClusterHarness,
    HarnessClient,
    running_cluster,
    wait_until,
)
from tests.support.tiny_models import make_tiny

PROMPTS = [
    [3 + (7 * i + j) % 350 for j in range(length)] for i, length in enumerate((5, 40, 90, 200))
]
NUM_TOKENS = 48
ENGINE = replace(
    TEST_ENGINE,
    device="cuda",
    dtype="bfloat16",
    deterministic=True,
    max_num_batched_tokens=128,
    kv_cache_memory_bytes=64 << 20,
)
"""Deterministic: what a prefill worker hands off must give the tokens of a single engine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny256")
    return make_tiny(
        path, "llama", hidden=256, heads=4, kv_heads=2, intermediate=512, max_position=2048
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Tokens of one engine that prefills and decodes."""
    with start(folder, num_prefill=0, num_decode=1) as harness:
        return asyncio.run(all_tokens(harness))


def start(
    folder: Path,
    *,
    num_prefill: int,
    num_decode: int,
    dtype: Dtype = "bfloat16",
    handoff: HandoffConfig = TEST_HANDOFF,
    eager: bool = False,
    step_delay_s: float = 0.0,
) -> AbstractContextManager[ClusterHarness]:
    return running_cluster(
        folder,
        engine=replace(ENGINE, model=str(folder), dtype=dtype, enforce_eager=eager),
        handoff=handoff,
        num_prefill=num_prefill,
        num_decode=num_decode,
        # A hand-off that fails must not be mended by computing the prompt again.
        max_local_prefill_tokens=0 if num_prefill else None,
        decode_faults=FaultConfig(step_delay_s=step_delay_s),
        ready_timeout_s=240.0,
    )


async def all_tokens(harness: ClusterHarness) -> list[list[int]]:
    async with harness.connect() as client:
        found = await asyncio.gather(*(generate(client, prompt) for prompt in PROMPTS))
    return [tokens_of(one) for one in found]


async def generate(client: HarnessClient, prompt: list[int], **extra: object) -> Generation:
    return await client.generate(
        prompt_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **extra
    )


def tokens_of(found: Generation) -> list[int]:
    return list(found.token_ids)


def test_TOK_kv_handed_off_between_two_gpu_processes_gives_one_engines_tokens(
    folder: Path, expected: list[list[int]]
) -> None:
    with start(folder, num_prefill=1, num_decode=1) as harness:
        assert asyncio.run(all_tokens(harness)) == expected
        # Figures are a heartbeat old, and these requests take less.
        wait_until(lambda: num_handoffs(harness) == len(PROMPTS), 10.0)
        figures = harness.scrape_worker("decode-0")
    assert figures["pdserve_recomputed_prompt_tokens_total"] == 0


def num_handoffs(harness: ClusterHarness) -> float:
    return harness.scrape_worker("decode-0")["pdserve_handoffs_completed_total"]


@pytest.mark.parametrize("eager", [True, False])
def test_TOK_layers_that_leave_during_their_step_give_one_engines_tokens(
    folder: Path, expected: list[list[int]], eager: bool
) -> None:
    handoff = replace(TEST_HANDOFF, frame_layers=1, layered_from_tokens=1)
    with start(folder, num_prefill=1, num_decode=1, handoff=handoff, eager=eager) as harness:
        assert asyncio.run(all_tokens(harness)) == expected
        wait_until(lambda: num_handoffs(harness) == len(PROMPTS), 10.0)
        figures = harness.scrape_worker("decode-0")
    assert figures["pdserve_recomputed_prompt_tokens_total"] == 0


def test_C14_a_gpu_decode_rank_killed_in_mid_stream_costs_no_token(folder: Path) -> None:
    async def run(harness: ClusterHarness, *, kills: bool) -> Generation:
        async with harness.connect() as client:
            await client.wait_idle()
            was_killed = not kills

            async def kill_once(found: Generation) -> None:
                nonlocal was_killed
                if was_killed or len(found.token_ids) < 6:
                    return
                was_killed = True
                worker_id = await client.busy_worker("decode")
                record = harness.cluster.member(worker_id).record
                assert record is not None
                for pid in record.rank_pids:
                    os.kill(pid, signal.SIGKILL)

            found = await client.generate(
                prompt_ids=PROMPTS[2],
                max_tokens=600,
                temperature=0.0,
                ignore_eos=True,
                on_message=kill_once,
            )
            assert was_killed
            return found

    # float32: the tokens made before the kill are computed again by the prompt's kernel, whose
    # last bit may differ.
    # Slow: whoever is to be killed must still be at work when a heartbeat has told who that is.
    with start(folder, num_prefill=1, num_decode=2, dtype="float32", step_delay_s=0.003) as harness:
        whole = asyncio.run(run(harness, kills=False))
        cut = asyncio.run(run(harness, kills=True))
    assert tokens_of(cut) == tokens_of(whole)
    assert cut.timeline is not None
    assert cut.timeline.attempts == 2
