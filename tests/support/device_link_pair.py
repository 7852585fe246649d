"""Both ends of device links in one process, and what tests do with them."""

import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEvent
from kv_transfer.receiver import LinkListener
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import LinkPeer, OutgoingFrame
from pdserve.cache.kv_region import KvRegion, make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import BlockId, Incarnation, ReservationId, WorkerId
from tests.support.host_device import HostDevice, Network
from tests.support.kv import fill

GEOMETRY = KvGeometry(
    num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", model_revision="r"
)
SHORT_FRAME_S = 1.0
"""Of tests of the deadline itself; with the usual one, a busy machine is not late."""
CONFIG = HandoffConfig(ring_slots=2, frame_timeout_s=9.0, connect_timeout_s=9.0, max_device_links=2)
SLOT_BYTES = 4096
D = Incarnation(9)
NUM_BLOCKS = 12


class Inbox:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.post = self.events.put

    def landed(self) -> FrameLanded:
        event = self.events.get(timeout=30)
        assert isinstance(event, FrameLanded), event
        return event

    def sent(self) -> FrameSent:
        event = self.events.get(timeout=30)
        assert isinstance(event, FrameSent), event
        return event

    def down(self) -> LinkDown:
        event = self.events.get(timeout=30)
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
        self,
        config: HandoffConfig = CONFIG,
        device: HostDevice | None = None,
        slot_bytes: int = SLOT_BYTES,
    ) -> LinkListener:
        listener = LinkListener(
            host="127.0.0.1",
            incarnation=D,
            config=config,
            slot_bytes=slot_bytes,
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


def config_of(*transports: str) -> HandoffConfig:
    return replace(CONFIG, transports=transports)


def impatient(config: HandoffConfig = CONFIG) -> HandoffConfig:
    return replace(config, frame_timeout_s=SHORT_FRAME_S)


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
    deadline_s = time.monotonic() + 30
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
