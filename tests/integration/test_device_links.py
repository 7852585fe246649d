"""Both ends of push and NCCL links in one process, over devices that tests can break."""

import gc
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEvent, TokensTold
from kv_transfer.protocol import FirstToken, SampledAhead
from kv_transfer.receiver import LinkListener
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import LinkPeer, OutgoingFrame
from pdserve.cache.kv_region import KvRegion, make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import BlockId, Incarnation, ReservationId, WorkerId
from tests.support.host_device import HostDevice, Network, held
from tests.support.kv import fill

GEOMETRY = KvGeometry(
    num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", model_revision="r"
)
CONFIG = HandoffConfig(ring_slots=2, frame_timeout_s=1.0, connect_timeout_s=1.0, max_device_links=2)
SLOT_BYTES = 4096
D = Incarnation(9)
NUM_BLOCKS = 12


class Inbox:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.post = self.events.put

    def landed(self) -> FrameLanded:
        event = self.events.get(timeout=10)
        assert isinstance(event, FrameLanded), event
        return event

    def sent(self) -> FrameSent:
        event = self.events.get(timeout=10)
        assert isinstance(event, FrameSent), event
        return event

    def down(self) -> LinkDown:
        event = self.events.get(timeout=10)
        assert isinstance(event, LinkDown), event
        return event


class Pair:
    """A prefill rank and a decode rank, each with KV on a device of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.network = Network()
        self.source = fill(KvTensors(GEOMETRY, NUM_BLOCKS), 1)
        self.target = KvTensors(GEOMETRY, NUM_BLOCKS)
        self.prefill = HostDevice(self.source, self.network, uuid="gpu 0")
        self.decode = HostDevice(self.target, self.network, uuid="gpu 1")
        self.arrivals, self.departures = Inbox(), Inbox()

    def listen(
        self, config: HandoffConfig = CONFIG, device: HostDevice | None = None
    ) -> LinkListener:
        listener = LinkListener(
            host="127.0.0.1",
            incarnation=D,
            config=config,
            slot_bytes=SLOT_BYTES,
            post=self.arrivals.post,
            device=device or self.decode,
        )
        self._stack.callback(listener.close)
        return listener

    def make_pool(
        self, number: int = 1, faults: FaultConfig | None = None, config: HandoffConfig = CONFIG
    ) -> LinkPool:
        me = SenderIdentity(
            worker_id=WorkerId(f"p{number}"), incarnation=Incarnation(number), host="127.0.0.1"
        )
        pool = LinkPool(
            me=me, config=config, post=self.departures.post, faults=faults, device=self.prefill
        )
        self._stack.callback(pool.close)
        return pool

    def open_memories(self) -> int:
        return self.prefill.switches.num_open + self.decode.switches.num_open


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def config_of(*transports: str) -> HandoffConfig:
    return HandoffConfig(
        ring_slots=2,
        frame_timeout_s=1.0,
        connect_timeout_s=1.0,
        max_device_links=2,
        transports=transports,
    )


def region_at(first: int, num_blocks: int = 1, dtype: str = "float32") -> KvRegion:
    table = tuple(BlockId((first + k) % NUM_BLOCKS) for k in range(num_blocks))
    return make_region(
        table=table,
        block_size=4,
        tokens=range(4 * num_blocks),
        layers=range(2),
        heads=range(2),
        dtype=dtype,
    )


def frame_of(pair: Pair, index: int, reservation: bytes = b"r") -> OutgoingFrame:
    region = region_at(index)
    return OutgoingFrame(
        reservation_id=ReservationId(reservation),
        frame_index=index,
        num_bytes=pair.source.frame_bytes(region),
        payload=region,
    )


def peer_of(listener: LinkListener) -> LinkPeer:
    return LinkPeer(worker_id=WorkerId("d"), incarnation=D, endpoint=listener.endpoint())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def blocks(kv: KvTensors, block: int) -> Tensor:
    return torch.stack(
        [half[4 * block : 4 * block + 4] for layer in (0, 1) for half in kv.layer(layer)]
    )


def unload(pair: Pair, listener: LinkListener, landed: FrameLanded, block: int) -> None:
    mark = pair.decode.scatter(region_at(block), listener.payload(landed))
    listener.release_slot(landed, mark)


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


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_frame_that_has_room_begins_as_it_is_pushed(pair: Pair, transport: str) -> None:
    config = config_of(transport)
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    listener.release_slot(pair.arrivals.landed())
    pair.departures.sent()
    time.sleep(0.2)  # until the slot is granted again
    with held(pair.prefill):
        for index in range(1, 5):
            pool.push(peer_of(listener), frame_of(pair, index))
        gathered = [region.block_ids[0] for region in pair.prefill.switches.gathered]
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
        assert time.monotonic() - begun_at_s < 0.2
        listener.release_slot(pair.arrivals.landed())
        assert time.monotonic() - begun_at_s >= 0.3


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
    config = config_of("nccl", "gloo")
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
        begun_at_s = time.monotonic()
        pool._links[D, 0].end("killed by the test")
        assert "peer" in pair.arrivals.down().detail
        assert time.monotonic() - begun_at_s < 0.5
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
        begun_at_s = time.monotonic()
        link.end("killed by the test")
        down = pair.departures.down()
        assert down.lost == {b"r"}
        assert time.monotonic() - begun_at_s < 0.5
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
    config = config_of("nccl")
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.departures.sent()
    assert "took more than 1.0 s" in pair.arrivals.down().detail
    pair.departures.down()
    wait_until(lambda: pair.open_memories() == 0)
    assert pair.decode.switches.num_aborted == pair.prefill.switches.num_aborted == 1


@pytest.mark.parametrize("transport", ["push", "nccl"])
def test_a_device_that_is_stuck_costs_the_link_at_the_deadline(pair: Pair, transport: str) -> None:
    config = config_of(transport)
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
    listener, pool = pair.listen(), pair.make_pool()
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
        events.append(pair.arrivals.events.get(timeout=10))
    # Two slots: two frames at most have landed before.
    assert len(events) <= 2
    told = events[-1]
    assert isinstance(told, TokensTold)
    assert told.words == WORDS
    assert told.link.peer == Incarnation(1)


def test_a_link_through_host_memory_tells_nothing(pair: Pair) -> None:
    config = config_of("gloo")
    listener, pool = pair.listen(config), pair.make_pool(config=config)
    pool.tell(D, WORDS)
    pool.push(peer_of(listener), frame_of(pair, 0))
    pair.arrivals.landed()
    pool.tell(D, WORDS)
    pool.push(peer_of(listener), frame_of(pair, 1))
    assert pair.arrivals.landed().frame_index == 1


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
