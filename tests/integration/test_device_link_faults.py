"""Push and NCCL links whose peers, devices or slots fail, and what is left of them."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from pdserve.request import ReservationId
from tests.support.device_link_pair import (
    D,
    Pair,
    config_of,
    frame_of,
    impatient,
    peer_of,
    region_at,
    wait_until,
)
from tests.support.host_device import held


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_A10_a_cancel_lets_steps_wait_for_what_still_reads_the_blocks(
    pair: Pair, transport: str
) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    peer = peer_of(listener)
    pool.push(peer, frame_of(pair, 0, b"kept"))
    listener.release_slot(pair.arrivals.landed())
    with held(pair.prefill):
        for index in range(1, 6):
            pool.push(peer, frame_of(pair, index, b"cancelled"))
        wait_until(lambda: len(pair.prefill.switches.gathered) == 3)
        pool.cancel(ReservationId(b"cancelled"))
        marks = pair.prefill.switches.steps_wait_for
        assert len(marks) == 2, "two slots were being written"
        assert not any(mark.is_reached() for mark in marks)
    time.sleep(0.1)
    assert len(pair.prefill.switches.gathered) == 3, "no block is read after a cancel"


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_C3_the_sender_s_death_in_mid_frame_frees_the_receiver_s_memory(
    pair: Pair, transport: str
) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    landed = pair.arrivals.landed()
    with held(pair.prefill):
        pool.push(peer_of(listener), frame_of(pair, 1))
        wait_until(lambda: len(pair.prefill.switches.gathered) == 2)
        pool._links[D, 0].end("killed by the test")
        detail = pair.arrivals.down().detail
        assert "peer" in detail
        assert "more than" not in detail
    assert torch.equal(listener.payload(landed), pair.source.pack(region_at(0)))
    assert pair.decode.switches.num_open == 1, "a landed frame outlives its link"
    listener.release_slot(landed)
    wait_until(lambda: pair.open_memories() == 0 and not listener._links)


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_C3_the_receiver_s_death_in_mid_frame_is_seen_at_once_and_a_new_epoch_works(
    pair: Pair, transport: str
) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    (link,) = listener._links.values()
    with held(pair.prefill):
        pool.push(peer_of(listener), frame_of(pair, 1))
        wait_until(lambda: len(pair.prefill.switches.gathered) == 2)
        link.end("killed by the test")
        down = pair.departures.down()
        assert down.lost == {b"r"}
        assert "more than" not in down.detail
    pair.arrivals.down()
    wait_until(lambda: pair.open_memories() == 0)
    pool.push(peer_of(listener), frame_of(pair, 2))
    landed = pair.arrivals.landed()
    assert (landed.link.epoch, landed.frame_index) == (2, 2)


def test_the_ring_stays_while_a_peer_may_still_write_it(pair: Pair) -> None:
    listener, pool = pair.listen(config_of("push")), pair.make_pool(config=config_of("push"))
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    (link,) = listener._links.values()
    with held(pair.prefill):
        pool.push(peer_of(listener), frame_of(pair, 1))
        wait_until(lambda: len(pair.prefill.switches.gathered) == 2)
        link.end("the lease is over")
        pair.arrivals.down()
        time.sleep(0.1)
        assert pair.decode.switches.num_open == 1
        assert pair.prefill.switches.num_open == 1
    wait_until(lambda: pair.open_memories() == 0)


def test_C3_a_receive_that_never_ends_is_aborted_at_the_deadline(pair: Pair) -> None:
    pair.decode.switches.loses_receives = True
    config = impatient(config_of("nccl"))
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.departures.sent()
    assert "took more than 1.0 s" in pair.arrivals.down().detail
    pair.departures.down()
    wait_until(lambda: pair.open_memories() == 0)
    assert pair.decode.switches.num_aborted == pair.prefill.switches.num_aborted == 1


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_device_that_is_stuck_costs_the_link_at_the_deadline(pair: Pair, transport: str) -> None:
    config = impatient(config_of(transport))
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    with held(pair.prefill):
        pool.push(peer_of(listener), frame_of(pair, 0))
        details = (pair.departures.down().detail, pair.arrivals.down().detail)
        assert any("more than 1.0 s" in detail for detail in details)


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_device_that_failed_costs_the_link_at_once(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pair.prefill.switches.is_failing = True
    pool.push(peer_of(listener), frame_of(pair, 0))
    assert "illegal memory access" in pair.departures.down().detail
    pair.arrivals.down()


def test_A4_a_full_ring_waits_as_long_as_the_engine_reads_but_not_beyond_the_deadline(
    pair: Pair,
) -> None:
    listener, pool = pair.listen(impatient()), pair.make_pool(config=impatient())
    for index in range(3):
        pool.push(peer_of(listener), frame_of(pair, index))
    pair.arrivals.landed()
    pair.arrivals.landed()
    pair.departures.sent()
    pair.departures.sent()
    assert "no landing slot was released in time" in pair.departures.down().detail


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_the_least_recently_used_idle_link_gives_its_ring(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener = pair.listen(config)
    pools = [pair.make_pool(number, config=config) for number in (1, 2, 3)]
    for pool in pools:
        pool.push(peer_of(listener), frame_of(pair, 0))
        listener.release_slot(pair.arrivals.landed())
        pair.departures.sent()
    wait_until(lambda: len(listener.links()) == 2)
    assert {link.peer for link in listener.links()} == {2, 3}
    assert pair.arrivals.events.empty(), "an orderly end alarms nobody"
    assert pair.departures.events.empty()
    pools[0].push(peer_of(listener), frame_of(pair, 1))
    assert pair.arrivals.landed().link.epoch == 2


def test_links_in_use_are_not_dropped_for_another_which_takes_gloo(pair: Pair) -> None:
    config = config_of("push", "gloo")
    listener = pair.listen(config)
    pools = [pair.make_pool(number, config=config) for number in (1, 2, 3)]
    for pool in pools:
        pool.push(peer_of(listener), frame_of(pair, 0))
        pair.arrivals.landed()
    assert sorted(link.transport for link in listener.links()) == ["gloo", "push", "push"]
    (last,) = pools[2].links()
    assert "push: all 2 links on the GPU are in use" in last.failures


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_goodbye_alarms_nobody_and_gives_all_memory_back(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    pool.close()
    wait_until(lambda: not listener._links and pair.open_memories() == 0)
    assert pair.arrivals.events.empty()
    assert pair.departures.events.empty()


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_dead_links_leave_no_thread_no_descriptor_and_no_memory(pair: Pair, transport: str) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    config = config_of(transport)
    listener = pair.listen(config)
    before = count()
    for number in range(1, 9):
        pool = pair.make_pool(number, config=config)
        pool.push(peer_of(listener), frame_of(pair, 0))
        landed = pair.arrivals.landed()
        pair.departures.sent()
        if number % 2:
            pool._links[D, 0].end("broken by the test")
            pair.arrivals.down()
            pair.departures.down()
        listener.release_slot(landed)
        pool.close()
    wait_until(lambda: not listener._links and not listener._threads)
    wait_until(lambda: count()[0] <= before[0] and count()[1] <= before[1])
    assert pair.open_memories() == 0


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_C6_a_long_run_keeps_its_order_and_its_slots(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    num_frames, num_pushed, num_landed = 1000, 0, 0
    while num_landed < num_frames:
        while num_pushed < num_frames and pool.has_room(D):
            pool.push(peer_of(listener), frame_of(pair, num_pushed))
            num_pushed += 1
        landed = pair.arrivals.landed()
        assert (landed.frame_index, landed.is_intact) == (num_landed, True)
        assert landed.slot < config.ring_slots
        listener.release_slot(landed)
        num_landed += 1
    wait_until(lambda: pair.departures.events.qsize() == num_frames)
    assert pool.links()[0].frames_in_flight == listener.links()[0].frames_in_flight == 0
