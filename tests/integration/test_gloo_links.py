"""Both ends of real links in one process, over loopback."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kv_transfer.events import FrameLanded, LinkEvent
from kv_transfer.memory_links import MemoryHub, MemoryReceiver, MemorySender
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import FrameReceiver, FrameSender
from pdserve.config.worker import FaultConfig
from pdserve.request import Incarnation, ReservationId, WorkerId
from tests.support.link_ends import (
    CONFIG,
    ME,
    SLOT_BYTES,
    D,
    Inbox,
    listen,
    make_pool,
    outgoing,
    peer_of,
    wait_until,
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as cleanup:
        yield cleanup


@pytest.fixture
def arrivals() -> Inbox:
    return Inbox()


@pytest.fixture
def departures() -> Inbox:
    return Inbox()


Ends = tuple[FrameSender, FrameReceiver]


@pytest.fixture(params=["gloo", "memory"])
def ends(
    request: pytest.FixtureRequest, stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> Ends:
    if request.param == "gloo":
        return make_pool(stack, departures), listen(stack, arrivals)
    hub = MemoryHub()
    sender = MemorySender(
        hub=hub,
        worker_id=ME.worker_id,
        incarnation=ME.incarnation,
        ring_slots=2,
        post=departures.post,
    )
    receiver = MemoryReceiver(
        hub=hub, incarnation=D, ring_slots=2, slot_bytes=SLOT_BYTES, post=arrivals.post
    )
    return sender, receiver


def test_frames_land_in_order_with_their_bytes(
    ends: Ends, arrivals: Inbox, departures: Inbox
) -> None:
    sender, receiver = ends
    for index in range(20):
        frame = outgoing(index, num_bytes=1 + 200 * index)
        sender.push(peer_of(receiver), frame)
        landed = arrivals.landed()
        assert (landed.frame_index, landed.is_intact) == (index, True)
        assert torch.equal(receiver.payload(landed), frame.payload)
        receiver.release_slot(landed)
        assert departures.sent().frame_index == index


def test_a_link_that_was_opened_early_carries_the_first_frame(ends: Ends, arrivals: Inbox) -> None:
    sender, receiver = ends
    sender.open(peer_of(receiver))
    sender.open(peer_of(receiver))
    sender.push(peer_of(receiver), outgoing(0))
    landed = arrivals.landed()
    assert (landed.frame_index, landed.link.epoch) == (0, 1)
    receiver.release_slot(landed)


def test_no_frame_lands_without_a_free_slot_and_the_queue_is_bounded(
    ends: Ends, arrivals: Inbox, departures: Inbox
) -> None:
    sender, receiver = ends
    peer = peer_of(receiver)
    for index in range(2):
        sender.push(peer, outgoing(index))
    held = [arrivals.landed(), arrivals.landed()]
    assert {landed.slot for landed in held} == {0, 1}
    index = 2
    while sender.has_room(D):
        sender.push(peer, outgoing(index))
        index += 1
        time.sleep(0.05)
    assert index <= 2 + CONFIG.ring_slots + 2
    assert arrivals.is_empty
    for landed in held:
        receiver.release_slot(landed)
    for expected in range(2, index):
        landed = arrivals.landed()
        assert landed.frame_index == expected
        receiver.release_slot(landed)


def test_a_cancel_drops_what_is_queued_of_one_reservation(ends: Ends, arrivals: Inbox) -> None:
    sender, receiver = ends
    peer = peer_of(receiver)
    for index in range(2):
        sender.push(peer, outgoing(index))
    held = [arrivals.landed(), arrivals.landed()]
    for index in range(2, 4):
        sender.push(peer, outgoing(index))
    wait_until(lambda: sender.links()[0].frames_in_flight <= 2)
    sender.push(peer, outgoing(8, reservation=b"cancelled"))
    sender.push(peer, outgoing(9, reservation=b"kept"))
    sender.cancel(ReservationId(b"cancelled"))
    for landed in held:
        receiver.release_slot(landed)
    seen = []
    while 9 not in seen:
        landed = arrivals.landed()
        seen.append(landed.frame_index)
        receiver.release_slot(landed)
    assert seen == [2, 3, 9]


def test_a_peer_that_is_not_there_costs_the_frame_and_no_wait(
    ends: Ends, departures: Inbox
) -> None:
    sender, receiver = ends
    peer = peer_of(receiver)
    receiver.close()
    sender.push(peer, outgoing(0))
    down = departures.down()
    assert down.lost == {b"r"}
    assert sender.has_room(D)


def test_another_incarnation_at_the_same_address_is_not_used(
    ends: Ends, departures: Inbox, arrivals: Inbox
) -> None:
    sender, receiver = ends
    sender.push(peer_of(receiver, Incarnation(8)), outgoing(0))
    assert departures.down().lost == {b"r"}
    assert not any(isinstance(event, FrameLanded) for event in _drain(arrivals))


def _drain(inbox: Inbox) -> list[LinkEvent]:
    events = []
    while not inbox.is_empty:
        events.append(inbox.get())
    return events


def test_a_corrupted_frame_is_seen_and_the_next_one_is_whole(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures, FaultConfig(corrupt_frame=2))
    flags = []
    for index in range(3):
        pool.push(peer_of(receiver), outgoing(index))
        landed = arrivals.landed()
        flags.append(landed.is_intact)
        receiver.release_slot(landed)
    assert flags == [True, False, True]


def test_a_silent_corruption_shows_only_in_the_bytes(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures, FaultConfig(corrupt_frame_silently=1))
    expected = outgoing(0).payload
    pool.push(peer_of(receiver), outgoing(0))
    landed = arrivals.landed()
    assert landed.is_intact
    assert int((receiver.payload(landed) != expected).sum()) == expected.numel() // 2


def test_a_goodbye_alarms_nobody(stack: ExitStack, arrivals: Inbox, departures: Inbox) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures)
    pool.push(peer_of(receiver), outgoing(0))
    receiver.release_slot(arrivals.landed())
    departures.sent()
    pool.close()
    wait_until(lambda: receiver.links() == ())
    assert arrivals.is_empty
    assert departures.is_empty


def test_a_link_that_died_is_replaced_under_the_next_epoch(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures)
    pool.push(peer_of(receiver), outgoing(0))
    receiver.release_slot(arrivals.landed())
    departures.sent()
    pool._links[D, 0].end("broken by the test")
    assert departures.down().link.epoch == 1
    assert arrivals.down().link.epoch == 1
    pool.push(peer_of(receiver), outgoing(1))
    assert arrivals.landed().link.epoch == 2


def test_landed_frames_outlive_their_link(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures)
    frame = outgoing(0)
    pool.push(peer_of(receiver), frame)
    landed = arrivals.landed()
    departures.sent()
    pool._links[D, 0].end("broken by the test")
    arrivals.down()
    assert torch.equal(receiver.payload(landed), frame.payload)
    receiver.release_slot(landed)
    wait_until(lambda: not receiver._links)


def test_the_least_recently_used_idle_link_makes_room(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    pool = make_pool(stack, departures, max_links=2)
    incarnations = [Incarnation(20), Incarnation(21), Incarnation(22)]
    receivers = [listen(stack, arrivals, incarnation) for incarnation in incarnations]
    for receiver, incarnation in zip(receivers, incarnations, strict=True):
        pool.push(peer_of(receiver, incarnation), outgoing(0))
        receiver.release_slot(arrivals.landed())
        departures.sent()
        wait_until(pool._links[incarnation, 0].is_idle.__bool__)
    assert [link.peer for link in pool.links()] == incarnations[1:]
    wait_until(lambda: receivers[0].links() == ())
    assert arrivals.is_empty


def test_dead_links_leave_no_thread_no_descriptor_and_no_ring(arrivals: Inbox) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    departures = Inbox()
    with ExitStack() as stack:
        receiver = listen(stack, arrivals)
        before = count()
        for number in range(12):
            pool = LinkPool(me=identity_at(number), config=CONFIG, post=departures.post)
            pool.push(peer_of(receiver), outgoing(0))
            landed = arrivals.landed()
            departures.sent()
            if number % 2:
                pool._links[D, 0].end("broken by the test")
                arrivals.down()
                departures.down()
            receiver.release_slot(landed)
            pool.close()
        wait_until(lambda: not receiver._links and not receiver._threads)
        wait_until(lambda: count()[0] <= before[0] and count()[1] <= before[1])


def identity_at(number: int) -> SenderIdentity:
    return SenderIdentity(
        worker_id=WorkerId("p"), incarnation=Incarnation(100 + number), host="127.0.0.1"
    )


def test_an_injected_delay_holds_each_frame_back(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures, FaultConfig(frame_delay_s=0.2))
    begun_at_s = time.monotonic()
    for index in range(2):
        pool.push(peer_of(receiver), outgoing(index))
    for _ in range(2):
        receiver.release_slot(arrivals.landed())
    assert time.monotonic() - begun_at_s >= 0.4
