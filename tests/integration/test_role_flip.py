"""Replicas that change their pool with their weights loaded, under traffic, on real processes."""

import asyncio
import signal
from pathlib import Path

import pytest

from pdserve.config.worker import FaultConfig
from pdserve.errors import ConfigError
from pdserve.request import Role
from tests.support.cluster import HarnessClient, running_cluster, wait_until_async
from tests.support.flips import flip
from tests.support.models import tiny_llama_folder  # noqa: F401

NUM_CLIENTS = 6


async def ask_until(client: HarnessClient, stopped: asyncio.Event, number: int) -> int:
    """Asks one request after the other, and returns how many were served whole."""
    num_done = 0
    while not stopped.is_set():
        prompt = [3 + (number * 31 + num_done * 7 + i) % 200 for i in range(60)]
        found = await client.generate(prompt_ids=prompt, max_tokens=24, ignore_eos=True)
        assert len(found.token_ids) == 24
        num_done += 1
    return num_done


async def test_replica_changes_its_pool_and_back_under_traffic_and_no_request_fails(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    with running_cluster(tiny_llama_folder, num_prefill=2, num_decode=1, can_flip=True) as harness:
        with pytest.raises(ConfigError, match="decode-0 is the last of the decode pool"):
            harness.cluster.flip("decode-0", Role.PREFILL)
        with pytest.raises(KeyError, match="decode-7"):
            harness.cluster.flip("decode-7", Role.PREFILL)
        async with harness.connect() as client:
            prompt = [9, 8, 7, 6, 5] * 30
            expected = await client.generate(prompt_ids=prompt, max_tokens=24, temperature=0.0)
            stopped = asyncio.Event()
            tasks = [asyncio.create_task(ask_until(client, stopped, i)) for i in range(NUM_CLIENTS)]
            was, now = await flip(harness, "prefill-1", Role.DECODE)
            assert was.record is not None
            assert now.record is not None
            # The very same processes, as somebody else.
            assert now.face_pid == was.face_pid
            assert now.record.rank_pids == was.record.rank_pids
            assert now.record.incarnation != was.record.incarnation
            assert now.num_restarts == 0

            async def router_uses_it() -> bool:
                infos = await client.loads()
                return "prefill-1" in infos and infos["prefill-1"].load.num_running > 0

            await wait_until_async(router_uses_it, 30, "it decodes")
            back_was, back = await flip(harness, "prefill-1", Role.PREFILL)
            assert back.record is not None
            assert back_was.record is not None
            assert back.record.rank_pids == was.record.rank_pids
            assert back.record.incarnation not in (
                was.record.incarnation,
                back_was.record.incarnation,
            )
            stopped.set()
            done = await asyncio.gather(*tasks)
            assert min(done) >= 1
            again = await client.generate(prompt_ids=prompt, max_tokens=24, temperature=0.0)
            assert again.token_ids == expected.token_ids
            # Nothing is left of its old lives.
            infos = await client.loads()
            ledger = infos["prefill-1"].ledger
            assert (ledger.sequences, ledger.reservations) == (0, 0)

        # It ends as any other does; and one that dies comes back as what it is.
        assert all(member.record is not None for member in harness.cluster.members())
        harness.cluster.kill("prefill-1", signal_number=signal.SIGKILL)
        harness.wait_all_registered()
        record = harness.cluster.member("prefill-1").record
        assert record is not None
        assert record.role is Role.PREFILL
        # A cluster that stops does not wait for somebody to come back.
        harness.cluster.flip("prefill-1", Role.DECODE)
    assert not [line for line in harness.lines if "killing it" in line]


@pytest.mark.soak
async def test_replica_that_does_not_get_empty_is_started_in_its_new_pool_and_nothing_is_lost(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    slow = FaultConfig(step_delay_s=0.05)
    with running_cluster(
        tiny_llama_folder, num_decode=2, can_flip=True, decode_faults=slow, drain_timeout_s=1.0
    ) as harness:
        async with harness.connect() as client:
            prompt = [9, 8, 7, 6, 5] * 30
            asking = asyncio.create_task(
                client.generate(prompt_ids=prompt, max_tokens=200, temperature=0.0)
            )

            async def decodes() -> str | None:
                infos = await client.loads()
                names = [n for n, info in infos.items() if n[0] == "d" and info.load.num_running]
                return names[0] if names else None

            async def has_begun() -> bool:
                return await decodes() is not None

            await wait_until_async(has_begun, 20, "the stream runs")
            busy = await decodes()
            assert busy is not None
            was, now = await flip(harness, busy, Role.PREFILL)
            assert now.num_restarts == was.num_restarts + 1
            assert now.face_pid != was.face_pid
            found = await asking
            assert len(found.token_ids) == 200
            again = await client.generate(prompt_ids=prompt, max_tokens=200, temperature=0.0)
            assert again.token_ids == found.token_ids
