"""Very many blocks at once over one device link: what is under way on the device stays bounded."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kv_transfer.events import FrameLanded
from kv_transfer.transport import OutgoingFrame
from pdserve.request import ReservationId
from tests.support.device_link_pair import D, Pair, config_of, peer_of, region_at

NUM_AT_ONCE = 64
BLOCKS_PER_HANDOFF = 4096
BLOCKS_PER_FRAME = 256
BLOCK_BYTES = 1024
MAX_STALL_S = 5.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def frame_of_many(pair: Pair, handoff: int, index: int) -> OutgoingFrame:
    region = region_at(handoff + index, BLOCKS_PER_FRAME)
    return OutgoingFrame(
        reservation_id=ReservationId(b"%d" % handoff),
        frame_index=index,
        num_bytes=pair.source.frame_bytes(region),
        payload=region,
    )


@pytest.mark.parametrize("transport", ["push", "nccl"])
@pytest.mark.parametrize("num_rounds", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_C4_hand_offs_of_4096_blocks_at_once_have_few_operations_under_way(
    pair: Pair, transport: str, num_rounds: int
) -> None:
    """64 hand-offs at once; an operation is a frame, whatever the number of its blocks.

    In place of 30 minutes on a GPU, rounds over a device in host memory.
    """
    config = config_of(transport)
    slot_bytes = BLOCKS_PER_FRAME * BLOCK_BYTES
    listener, pool = pair.listen(config, slot_bytes=slot_bytes), pair.make_pool(config=config)
    num_frames = BLOCKS_PER_HANDOFF // BLOCKS_PER_FRAME
    handoffs = range(NUM_AT_ONCE * num_rounds)
    waiting = deque(
        (handoff, index)
        for first in handoffs[::NUM_AT_ONCE]
        for index in range(num_frames)
        for handoff in range(first, first + NUM_AT_ONCE)
    )
    landed_of: dict[ReservationId, list[int]] = {}
    begun = pair.prefill.switches.gathered
    for num_released in range(len(waiting)):
        while waiting and pool.has_room(D):
            pool.push(peer_of(listener), frame_of_many(pair, *waiting.popleft()))
        assert len(begun) - num_released <= config.ring_slots
        landed = pair.arrivals.events.get(timeout=MAX_STALL_S)
        assert isinstance(landed, FrameLanded), landed
        assert landed.is_intact
        landed_of.setdefault(landed.reservation_id, []).append(landed.frame_index)
        listener.release_slot(landed)
    assert len(begun) == len(handoffs) * num_frames
    assert list(landed_of.values()) == [list(range(num_frames))] * len(handoffs)
