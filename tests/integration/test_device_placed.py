"""Frames that the engine expects, over device links: written to their blocks as they land."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kv_transfer.events import FrameLanded, FramePlaced
from kv_transfer.expected_frames import ExpectedFrame, ExpectedFrames
from kv_transfer.receiver import LinkListener
from pdserve.config.worker import FaultConfig
from pdserve.request import Incarnation, ReservationId
from tests.support.device_link_pair import (
    NUM_BLOCKS,
    Pair,
    blocks,
    config_of,
    frame_of,
    impatient,
    peer_of,
    region_at,
    wait_until,
)
from tests.support.host_device import held

R = ReservationId(b"r")
TRANSPORTS = ["push", "nccl"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def expect(
    pair: Pair,
    listener: LinkListener,
    *,
    peer: int = 1,
    num_bytes: int | None = None,
    prefill_rank: int = 0,
) -> None:
    """Block `index` of prefill's is to be the block at the other end of decode's."""
    whole = pair.target.frame_bytes(region_at(0))
    frames = {
        index: ExpectedFrame(
            num_bytes=num_bytes or whole,
            prefill_rank=prefill_rank,
            region=region_at(NUM_BLOCKS - 1 - index),
        )
        for index in range(NUM_BLOCKS)
    }
    listener.expect(ExpectedFrames(reservation_id=R, peer=Incarnation(peer), frames=frames))


def next_placed(pair: Pair) -> FramePlaced:
    event = pair.arrivals.events.get(timeout=30)
    assert isinstance(event, FramePlaced), event
    return event


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_expected_frames_lie_in_their_blocks_when_the_engine_hears_of_them(
    pair: Pair, transport: str
) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    expect(pair, listener)
    for index in range(NUM_BLOCKS):
        pool.push(peer_of(listener), frame_of(pair, index))
    for index in range(NUM_BLOCKS):
        placed = next_placed(pair)
        assert (placed.frame_index, placed.is_intact) == (index, True)
        assert placed.num_bytes == pair.source.frame_bytes(region_at(0))
        there = blocks(pair.target, NUM_BLOCKS - 1 - index)
        assert torch.equal(there, blocks(pair.source, index))
    listener.withdraw(R)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_frame_is_told_of_only_when_it_is_written(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    expect(pair, listener)
    pool.push(peer_of(listener), frame_of(pair, 0))
    next_placed(pair)
    with held(pair.decode):
        pool.push(peer_of(listener), frame_of(pair, 1))
        time.sleep(0.1)
        assert pair.arrivals.events.empty()
    assert next_placed(pair).frame_index == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_spoilt_frame_is_told_of_as_such(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener = pair.listen(config)
    pool = pair.make_pool(faults=FaultConfig(corrupt_frame=2), config=config)
    expect(pair, listener)
    for index in range(3):
        pool.push(peer_of(listener), frame_of(pair, index))
    assert [next_placed(pair).is_intact for _ in range(3)] == [True, False, True]


def test_A10_nobody_writes_the_blocks_of_a_reservation_that_was_withdrawn(pair: Pair) -> None:
    listener, pool = pair.listen(), pair.make_pool()
    expect(pair, listener)
    pool.push(peer_of(listener), frame_of(pair, 0))
    next_placed(pair)
    listener.withdraw(R)
    before = blocks(pair.target, NUM_BLOCKS - 2).clone()
    pool.push(peer_of(listener), frame_of(pair, 1))
    landed = pair.arrivals.landed()
    assert torch.equal(blocks(pair.target, NUM_BLOCKS - 2), before)
    listener.release_slot(landed)


def test_A10_a_withdrawal_waits_for_what_is_being_written(pair: Pair) -> None:
    listener, pool = pair.listen(), pair.make_pool()
    expect(pair, listener)
    pool.push(peer_of(listener), frame_of(pair, 0))
    next_placed(pair)
    with held(pair.decode):
        pool.push(peer_of(listener), frame_of(pair, 1))
        written = blocks(pair.source, 1)
        wait_until(lambda: torch.equal(blocks(pair.target, NUM_BLOCKS - 2), written))
        thread = threading.Thread(target=listener.withdraw, args=(R,))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()


def test_a_device_that_does_not_end_fails_the_withdrawal_at_its_deadline(pair: Pair) -> None:
    listener, pool = pair.listen(impatient()), pair.make_pool()
    expect(pair, listener)
    pool.push(peer_of(listener), frame_of(pair, 0))
    next_placed(pair)
    with held(pair.decode):
        pool.push(peer_of(listener), frame_of(pair, 1))
        written = blocks(pair.source, 1)
        wait_until(lambda: torch.equal(blocks(pair.target, NUM_BLOCKS - 2), written))
        with pytest.raises(TimeoutError, match="not written"):
            listener.withdraw(R)


@pytest.mark.parametrize(
    "other", [{"peer": 2}, {"num_bytes": 128}, {"prefill_rank": 1}], ids=lambda one: next(iter(one))
)
def test_a_frame_that_is_not_as_expected_waits_for_the_engine(
    pair: Pair, other: dict[str, int]
) -> None:
    listener, pool = pair.listen(), pair.make_pool()
    expect(pair, listener, **other)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    assert not blocks(pair.target, NUM_BLOCKS - 1).any()


def test_a_frame_that_comes_twice_is_written_once(pair: Pair) -> None:
    listener, pool = pair.listen(), pair.make_pool()
    expect(pair, listener)
    pool.push(peer_of(listener), frame_of(pair, 0))
    next_placed(pair)
    pool.push(peer_of(listener), frame_of(pair, 0))
    event = pair.arrivals.landed()
    assert isinstance(event, FrameLanded)
    listener.release_slot(event)
