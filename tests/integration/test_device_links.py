"""Frames over push and NCCL links between two devices, and the choice of a transport."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from kv_transfer.events import FrameLanded, TokensTold
from kv_transfer.outgoing_routes import NcclRoute, PushRoute
from kv_transfer.protocol import FirstToken, SampledAhead
from kv_transfer.sender import LinkPool
from pdserve.config.worker import FaultConfig
from pdserve.request import Incarnation, ReservationId
from pdserve.rpc.v1.link_pb2 import LinkNotice
from tests.support.device_link_pair import (
    NUM_BLOCKS,
    D,
    Pair,
    blocks,
    config_of,
    frame_of,
    peer_of,
    region_at,
    unload,
    wait_until,
)
from tests.support.host_device import held


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_frames_of_many_slots_are_scattered_exactly(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    for index in range(NUM_BLOCKS):
        pool.push(peer_of(listener), frame_of(pair, index))
    for index in range(NUM_BLOCKS):
        landed = pair.arrivals.landed()
        assert (landed.frame_index, landed.is_intact) == (index, True)
        unload(pair, listener, landed, NUM_BLOCKS - 1 - index)
        assert pair.departures.sent().frame_index == index
        assert torch.equal(blocks(pair.target, NUM_BLOCKS - 1 - index), blocks(pair.source, index))
    assert [link.transport for link in (*pool.links(), *listener.links())] == [transport] * 2


def num_granted(pool: LinkPool) -> int:
    """Slots that the peer lets the one link write."""
    sender = pool._links[D, 0]._sender
    assert sender is not None
    assert isinstance(sender._route, PushRoute | NcclRoute)
    return len(sender._route._granted._slots)


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_frame_that_has_room_begins_as_it_is_pushed(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    wait_until(lambda: num_granted(pool) == 2)
    switches = pair.prefill.switches
    with held(pair.prefill):
        pool.push(peer_of(listener), frame_of(pair, 1))
        assert len(switches.gathered) == 2
        for index in range(2, 5):
            pool.push(peer_of(listener), frame_of(pair, index))
        wait_until(lambda: len(switches.gathered) == 3)
        gathered = [region.block_ids[0] for region in switches.gathered]
    assert gathered == [0, 1, 2], "two are under way, the others wait for slots"
    for index in range(1, 5):
        landed = pair.arrivals.landed()
        assert landed.frame_index == index
        listener.release_slot(landed)


def test_an_injected_delay_does_not_hold_the_engine_up(pair: Pair) -> None:
    listener = pair.listen()
    pool = pair.make_pool(faults=FaultConfig(frame_delay_s=0.3))
    for index in range(2):
        begun_at_s = time.monotonic()
        pool.push(peer_of(listener), frame_of(pair, index))
        listener.release_slot(pair.arrivals.landed())
        assert time.monotonic() - begun_at_s >= 0.3
    # A frame is gathered by the thread that waits before it.
    assert threading.current_thread() not in pair.prefill.switches.gathered_by


def test_gloo_carries_a_device_s_frames_through_host_memory(pair: Pair) -> None:
    config = config_of("gloo")
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    for index in range(4):
        pool.push(peer_of(listener), frame_of(pair, index))
        landed = pair.arrivals.landed()
        unload(pair, listener, landed, index)
        assert torch.equal(blocks(pair.target, index), blocks(pair.source, index))
    assert pair.open_memories() == 0


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_no_frame_lands_without_a_free_slot(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    for index in range(5):
        pool.push(peer_of(listener), frame_of(pair, index))
    held_slots = [pair.arrivals.landed(), pair.arrivals.landed()]
    time.sleep(0.1)
    assert pair.arrivals.events.empty()
    with held(pair.decode):
        unload(pair, listener, held_slots[0], 0)
        time.sleep(0.1)
        assert pair.arrivals.events.empty(), "a slot that is still read was written"
    assert pair.arrivals.landed().frame_index == 2


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_spoilt_frame_is_seen_and_the_next_one_is_whole(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener = pair.listen(config)
    pool = pair.make_pool(faults=FaultConfig(corrupt_frame=2), config=config)
    flags = []
    for index in range(3):
        pool.push(peer_of(listener), frame_of(pair, index))
        landed = pair.arrivals.landed()
        flags.append(landed.is_intact)
        listener.release_slot(landed)
    assert flags == [True, False, True]


def test_a_silent_corruption_passes_the_checksum(pair: Pair) -> None:
    listener = pair.listen()
    pool = pair.make_pool(faults=FaultConfig(corrupt_frame_silently=1))
    pool.push(peer_of(listener), frame_of(pair, 0))
    landed = pair.arrivals.landed()
    assert landed.is_intact
    assert not torch.equal(listener.payload(landed), pair.source.pack(region_at(0)))


def test_push_that_does_not_come_up_gives_way_to_nccl_and_says_so(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.prefill.switches.cannot_open = True
    listener, pool = pair.listen(), pair.make_pool()
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    for link in (*pool.links(), *listener.links()):
        assert link.transport == "nccl"
        (failure,) = link.failures
        assert "push: at the prefill rank: cudaIpcOpenMemHandle failed" in failure
    assert "transport did not come up" in caplog.text


@pytest.mark.parametrize("switch", ["prefill", "decode"])
def test_nccl_that_does_not_come_up_at_either_end_gives_way_to_gloo(
    pair: Pair, switch: str
) -> None:
    broken = pair.prefill if switch == "prefill" else pair.decode
    broken.switches.cannot_join = True
    # The other end waits for it for that long.
    config = replace(config_of("nccl", "gloo"), connect_timeout_s=1.0)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    (link,) = pool.links()
    assert link.transport == "gloo"
    assert "unhandled system error" in link.failures[0] or "did not come" in link.failures[0]
    assert pair.open_memories() == 0


def test_a_full_device_leaves_gloo(pair: Pair) -> None:
    pair.decode.switches.cannot_allocate = True
    listener, pool = pair.listen(), pair.make_pool()
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    (link,) = listener.links()
    assert link.transport == "gloo"
    assert [failure.split(":")[0] for failure in link.failures] == ["push", "nccl"]


def test_without_a_common_transport_the_link_is_refused(pair: Pair) -> None:
    listener, pool = pair.listen(config_of("push")), pair.make_pool(config=config_of("gloo"))
    pool.push(peer_of(listener), frame_of(pair, 0))
    assert pair.departures.down().lost == {b"r"}
    assert listener.num_rejected == 1


def test_the_last_transport_s_failure_costs_the_frame(pair: Pair) -> None:
    pair.prefill.switches.cannot_open = True
    listener, pool = pair.listen(config_of("push")), pair.make_pool(config=config_of("push"))
    pool.push(peer_of(listener), frame_of(pair, 0))
    assert pair.departures.down().lost == {b"r"}
    assert "no transport is left" in pair.arrivals.down().detail
    wait_until(lambda: pair.open_memories() == 0)


WORDS = SampledAhead(
    reservation_id=ReservationId(b"r"),
    first_tokens=(FirstToken(token_id=7, output_index=0),),
    manifest_digest=b"digest",
)


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_first_tokens_overtake_frames_that_wait_for_slots(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    pair.departures.sent()
    for index in range(1, 6):
        pool.push(peer_of(listener), frame_of(pair, index))
    pool.tell(D, WORDS)
    events = []
    while not events or isinstance(events[-1], FrameLanded):
        events.append(pair.arrivals.events.get(timeout=30))
    # Two slots: two frames at most have landed before.
    assert len(events) <= 2
    told = events[-1]
    assert isinstance(told, TokensTold)
    assert told.words == WORDS
    assert told.link.peer == Incarnation(1)


def test_first_tokens_do_not_wait_for_the_link_s_thread(pair: Pair) -> None:
    config = config_of("push")
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    pair.departures.sent()
    (link,) = pool._links.values()
    senders: list[str] = []
    assert link._channel is not None
    told = link._channel.try_send

    def note_thread(notice: LinkNotice) -> bool:
        senders.append(threading.current_thread().name)
        return told(notice)

    link._channel.try_send = note_thread  # type: ignore[method-assign]
    pool.tell(D, WORDS)
    assert senders == [threading.current_thread().name]
    assert pair.arrivals.events.get(timeout=10).words == WORDS


def test_first_tokens_for_a_peer_that_takes_nothing_hold_nobody_up(pair: Pair) -> None:
    config = config_of("push")
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    pair.departures.sent()
    (link,) = pool._links.values()
    assert link._channel is not None
    # As a frozen peer leaves it: the next turn of the link's thread is what sends them.
    link._channel.try_send = lambda notice: False  # type: ignore[method-assign]
    pool.tell(D, WORDS)
    assert pair.arrivals.events.get(timeout=10).words == WORDS


def test_a_link_through_host_memory_tells_nothing(pair: Pair) -> None:
    config = config_of("gloo")
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.tell(D, WORDS)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    pool.tell(D, WORDS)
    pool.push(peer_of(listener), frame_of(pair, 1))
    assert pair.arrivals.landed().frame_index == 1
