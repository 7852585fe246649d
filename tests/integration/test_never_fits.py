"""Requests that a prefill worker can hold and no decode worker ever could, in real processes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pdserve.errors import TooLong
from pdserve.rpc.status import error_from_rpc
from tests.support.cluster import TEST_ENGINE, HarnessClient, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger

NUM_REQUESTS = 200
NUM_AT_ONCE = 20
NUM_BLOCKS = 32
KV_BLOCK_BYTES = 8192
MAX_RELEASE_S = 1.0


async def ask(client: HarnessClient, number: int) -> None:
    """Asks for two samples of a prompt that fills the pool: there is no block to begin in."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(
            prompt_ids=[3 + (number + place) % 300 for place in range(500)], n=2, max_tokens=4
        )
    assert isinstance(error_from_rpc(caught.value), TooLong), caught.value.details()


@pytest.mark.soak
async def test_A2_samples_that_decode_can_never_hold_end_and_leave_no_block(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        max_model_len=512,
        kv_cache_memory_bytes=NUM_BLOCKS * KV_BLOCK_BYTES,
    )
    with running_cluster(tiny_llama_folder, engine=engine) as harness:
        async with harness.connect() as client:
            canary = await Canary.hatch(harness, client)
            for first in range(0, NUM_REQUESTS, NUM_AT_ONCE):
                numbers = range(first, first + NUM_AT_ONCE)
                await asyncio.gather(*(ask(client, number) for number in numbers))
                await assert_ledger(client, num_workers=2, timeout_s=MAX_RELEASE_S)
            await canary.assert_alive(client)
