"""Links and clusters without any traffic for longer than every time-out: that is no failure."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config.worker import HandoffConfig
from tests.support.cluster import running_cluster
from tests.support.device_link_pair import CONFIG, Pair, frame_of, peer_of
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_same_tokens

SHORT = replace(CONFIG, frame_timeout_s=1.0, connect_timeout_s=1.5)
IDLE_S = 3.5
"""More than twice the longest of these."""
CLUSTER_IDLE_S = 12.0


def test_C8_a_receiver_without_traffic_takes_the_next_frame_over_the_same_link() -> None:
    """One pair for each transport; in place of 30 minutes, time-outs of about a second."""
    with ExitStack() as stack:
        pairs = {}
        for transport in ("push", "nccl", "gloo"):
            config, pair = replace(SHORT, transports=(transport,)), Pair(stack)
            pairs[transport] = (pair, pair.listen(config), pair.make_pool(config=config))
        for index in range(2):
            if index:
                time.sleep(IDLE_S)
            for transport, (pair, listener, pool) in pairs.items():
                assert pair.arrivals.events.empty(), "nothing ended meanwhile"
                assert pair.departures.events.empty()
                pool.push(peer_of(listener), frame_of(pair, index))
                landed = pair.arrivals.landed()
                assert (landed.frame_index, landed.is_intact) == (index, True)
                assert landed.link.epoch == 1
                assert [link.transport for link in listener.links()] == [transport]
                listener.release_slot(landed)
                pair.departures.sent()


@pytest.mark.soak
async def test_C8_an_idle_cluster_serves_the_next_request_as_ever(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    """Real processes, all of whose time-outs and leases are shorter than the pause."""
    handoff = HandoffConfig(
        frame_tokens=64,
        lease_s=2.0,
        hold_s=3.0,
        call_timeout_s=3.0,
        frame_timeout_s=3.0,
        connect_timeout_s=3.0,
    )
    times = {"registry_lease_s": 2.0, "frozen_after_s": 3.0, "worker_silence_s": 2.0}
    wish = {"prompt_ids": range(5, 100), "max_tokens": 8, "temperature": 0.0}
    with running_cluster(tiny_llama_folder, handoff=handoff, **times) as harness:
        async with harness.connect() as client:
            first = await client.generate(**wish)
            links = [
                link.epoch for worker in (await client.loads()).values() for link in worker.links
            ]
            assert links == [1, 1]
            await asyncio.sleep(CLUSTER_IDLE_S)
            wish["prompt_ids"] = range(5, 101)
            second = await client.generate(**wish)
            third = await client.generate(**wish)
            assert_same_tokens(third, second)
            for found in (first, second):
                assert_not_recomputed(found)
                assert found.timeline is not None
                assert found.timeline.attempts == 1
            assert second.token_ids != []
            workers = (await client.loads()).values()
            assert [link.epoch for worker in workers for link in worker.links] == links
            await assert_ledger(client, num_workers=2)
        assert all(member.num_restarts == 0 for member in harness.cluster.members())
