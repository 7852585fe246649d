"""Both ends of a link in one process: what they are made of, and where their events go."""

import queue
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEvent, Post
from kv_transfer.receiver import LinkListener
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import FrameReceiver, LinkPeer, OutgoingFrame
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId

CONFIG = HandoffConfig(ring_slots=2, frame_timeout_s=3.0, connect_timeout_s=1.0)
SLOT_BYTES = 4096
D = Incarnation(9)
ME = SenderIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1), host="127.0.0.1")


class Inbox:
    def __init__(self) -> None:
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.post: Post = self._events.put

    def get(self) -> LinkEvent:
        return self._events.get(timeout=30)

    def landed(self) -> FrameLanded:
        event = self.get()
        assert isinstance(event, FrameLanded), event
        return event

    def sent(self) -> FrameSent:
        event = self.get()
        assert isinstance(event, FrameSent), event
        return event

    def down(self) -> LinkDown:
        event = self.get()
        assert isinstance(event, LinkDown), event
        return event

    @property
    def is_empty(self) -> bool:
        return self._events.empty()


def listen(
    stack: ExitStack, inbox: Inbox, incarnation: Incarnation = D, slot_bytes: int = SLOT_BYTES
) -> LinkListener:
    listener = LinkListener(
        host="127.0.0.1",
        incarnation=incarnation,
        config=CONFIG,
        slot_bytes=slot_bytes,
        post=inbox.post,
    )
    stack.callback(listener.close)
    return listener


def make_pool(
    stack: ExitStack, inbox: Inbox, faults: FaultConfig | None = None, max_links: int = 64
) -> LinkPool:
    pool = LinkPool(me=ME, config=CONFIG, post=inbox.post, faults=faults, max_links=max_links)
    stack.callback(pool.close)
    return pool


def peer_of(receiver: FrameReceiver, incarnation: Incarnation = D) -> LinkPeer:
    return LinkPeer(worker_id=WorkerId("d"), incarnation=incarnation, endpoint=receiver.endpoint())


def outgoing(index: int, num_bytes: int = 100, reservation: bytes = b"r") -> OutgoingFrame:
    payload = (torch.arange(num_bytes) * (index + 3)).to(torch.uint8)
    return OutgoingFrame(
        reservation_id=ReservationId(reservation),
        frame_index=index,
        num_bytes=num_bytes,
        payload=payload,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
