"""Device links that wait for steps: nothing is read, announced or told before it is computed."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kv_transfer.link_device import DeviceFault
from kv_transfer.transport import OutgoingFrame
from pdserve.config.worker import HandoffConfig
from pdserve.request import ReservationId
from tests.support.device_link_pair import (
    NUM_BLOCKS,
    Pair,
    blocks,
    config_of,
    frame_of,
    peer_of,
    unload,
    wait_until,
)
from tests.support.kv import fill


class StepMark:
    """Behind a group of layers of a step; a test says when the device is there."""

    def __init__(self) -> None:
        self.is_computed = False
        self.has_failed = False
        self.num_looks = 0

    def is_reached(self) -> bool:
        self.num_looks += 1
        if self.has_failed:
            raise DeviceFault("CUDA error: an illegal memory access was encountered")
        return self.is_computed


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


WAYS = {
    "push": config_of("push"),
    "nccl": config_of("nccl"),
    "gloo": config_of("gloo"),
}


@pytest.fixture(params=WAYS)
def config(request: pytest.FixtureRequest) -> HandoffConfig:
    return WAYS[request.param]


@pytest.fixture(params=["push", "nccl"])
def device_config(request: pytest.FixtureRequest) -> HandoffConfig:
    return WAYS[request.param]


def awaiting(pair: Pair, index: int, mark: StepMark, reservation: bytes = b"r") -> OutgoingFrame:
    return replace(frame_of(pair, index, reservation), after=mark)


def compute(pair: Pair, block: int, seed: int) -> Tensor:
    """Writes a block as a step would; returns its values."""
    for layer in (0, 1):
        for half in pair.source.layer(layer):
            half[4 * block : 4 * block + 4].fill_(seed)
    return blocks(pair.source, block).clone()


def test_what_is_sent_is_what_the_step_computed_in_the_order_of_the_groups(
    pair: Pair, config: HandoffConfig
) -> None:
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    marks = [StepMark() for _ in range(6)]
    for index, mark in enumerate(marks):
        pool.push(peer_of(listener), awaiting(pair, index, mark))
    for index, mark in enumerate(marks):
        time.sleep(0.02)
        assert pair.arrivals.events.empty()
        expected = compute(pair, index, 10 + index)
        mark.is_computed = True
        landed = pair.arrivals.landed()
        assert (landed.frame_index, landed.is_intact) == (index, True)
        unload(pair, listener, landed, NUM_BLOCKS - 1 - index)
        assert pair.departures.sent().frame_index == index
        assert torch.equal(blocks(pair.target, NUM_BLOCKS - 1 - index), expected)


def test_later_groups_do_not_overtake(pair: Pair, device_config: HandoffConfig) -> None:
    listener, pool = pair.listen(device_config), pair.make_pool(config=device_config)
    first, second = StepMark(), StepMark()
    pool.push(peer_of(listener), awaiting(pair, 0, first))
    pool.push(peer_of(listener), awaiting(pair, 1, second))
    second.is_computed = True
    time.sleep(0.05)
    assert pair.arrivals.events.empty()
    first.is_computed = True
    assert [pair.arrivals.landed().frame_index for _ in range(2)] == [0, 1]


def test_waiting_for_a_step_takes_few_looks(pair: Pair) -> None:
    """Each takes the interpreter's lock from the thread that launches the next step."""
    config = WAYS["push"]
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.departures.sent()
    mark = StepMark()
    pushed_at_s = time.monotonic()
    pool.push(peer_of(listener), awaiting(pair, 1, mark))
    time.sleep(0.1)
    wait_until(lambda: mark.num_looks > 5)
    num_looks, waited_s = mark.num_looks, time.monotonic() - pushed_at_s
    assert num_looks < 4 * waited_s / 200e-6
    computed_at_s = time.monotonic()
    mark.is_computed = True
    on_link_s = pair.departures.sent().on_link_s
    assert on_link_s is not None
    link_s = time.monotonic() - computed_at_s
    # It may have looked a moment before the step was computed, but not before all of the wait.
    assert on_link_s < link_s + waited_s / 2, "the time of the step is not the link's"


def test_A10_a_cancel_in_mid_step_lets_later_steps_wait_and_reads_no_further_block(
    pair: Pair, device_config: HandoffConfig
) -> None:
    listener, pool = pair.listen(device_config), pair.make_pool(config=device_config)
    pool.push(peer_of(listener), frame_of(pair, 0, b"kept"))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    mark = StepMark()
    for index in range(1, 6):
        pool.push(peer_of(listener), awaiting(pair, index, mark, b"cancelled"))
    wait_until(lambda: len(pair.prefill.switches.gathered) == 3)
    pool.cancel(ReservationId(b"cancelled"))
    waiting = pair.prefill.switches.steps_wait_for
    assert len(waiting) == 2, "two frames were waiting on the device"
    assert not any(one.is_reached() for one in waiting)
    pool.push(peer_of(listener), frame_of(pair, 7, b"kept"))
    mark.is_computed = True
    wait_until(lambda: all(one.is_reached() for one in waiting))
    # Those under way are sent to their end; the receiver knows whose they are.
    seen = []
    for _ in range(3):
        landed = pair.arrivals.landed()
        seen.append((landed.reservation_id, landed.frame_index))
        listener.release_slot(landed)
    assert seen == [(b"cancelled", 1), (b"cancelled", 2), (b"kept", 7)]
    assert len(pair.prefill.switches.gathered) == 4


def test_a_step_that_fails_on_the_device_delivers_nothing(
    pair: Pair, device_config: HandoffConfig
) -> None:
    listener, pool = pair.listen(device_config), pair.make_pool(config=device_config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    mark = StepMark()
    pool.push(peer_of(listener), awaiting(pair, 1, mark, b"lost"))
    mark.has_failed = True
    down = pair.departures.down()
    assert "illegal memory access" in down.detail
    assert down.lost == {b"lost"}
    pair.arrivals.down()
    assert pair.arrivals.events.empty()


def test_a_step_that_never_ends_costs_the_link_at_the_deadline(
    pair: Pair, device_config: HandoffConfig
) -> None:
    config = replace(device_config, frame_timeout_s=0.2)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    mark = StepMark()
    pool.push(peer_of(listener), awaiting(pair, 0, mark))
    assert "more than 0.2 s" in pair.departures.down().detail
    pair.arrivals.down()
    mark.is_computed = True


def test_C3_a_peer_that_dies_in_mid_step_loses_what_waits_for_it(
    pair: Pair, device_config: HandoffConfig
) -> None:
    fill(pair.source, 3)
    listener, pool = pair.listen(device_config), pair.make_pool(config=device_config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    mark = StepMark()
    pool.push(peer_of(listener), awaiting(pair, 1, mark, b"lost"))
    (link,) = listener._links.values()
    link.end("killed by the test")
    assert pair.departures.down().lost == {b"lost"}
    pair.arrivals.down()
    time.sleep(0.05)
    assert pair.prefill.switches.num_open > 0, "the device may still write to the peer"
    mark.is_computed = True
    wait_until(lambda: pair.open_memories() == 0)
