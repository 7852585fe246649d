"""One end of a KV link in a process of its own, driven by the tests over stdin and stdout.

    python -m tests.support.link_peer send HOST PORT TOKEN_HEX PEER_INCARNATION INCARNATION
    python -m tests.support.link_peer receive INCARNATION SLOT_BYTES

A sender reads lines `push RESERVATION_HEX INDEX NUM_BYTES` and `quit`; both ends print one line per
event. Every frame's bytes are `frame_payload(index, num_bytes)`.
"""

import queue
import sys
import threading

import torch

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEvent
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.receiver import LinkListener
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import LinkPeer, OutgoingFrame
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId

CONFIG = HandoffConfig(ring_slots=2, frame_timeout_s=1.5, connect_timeout_s=3.0)


def frame_payload(index: int, num_bytes: int) -> torch.Tensor:
    """Returns bytes that differ from frame to frame and along the frame."""
    period = torch.arange(index % 251, index % 251 + 251).remainder(251).to(torch.uint8)
    return period.repeat(num_bytes // 251 + 1)[:num_bytes]


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def send(host: str, port: str, token: str, peer: str, incarnation: str) -> None:
    events: queue.SimpleQueue[LinkEvent | list[str]] = queue.SimpleQueue()
    me = SenderIdentity(
        worker_id=WorkerId("p"), incarnation=Incarnation(int(incarnation)), host="127.0.0.1"
    )
    pool = LinkPool(me=me, config=CONFIG, post=events.put)
    endpoint = LinkEndpoint(host=host, port=int(port), token=bytes.fromhex(token))
    target = LinkPeer(
        worker_id=WorkerId("d"), incarnation=Incarnation(int(peer)), endpoint=endpoint
    )

    def read_commands() -> None:
        for line in sys.stdin:
            events.put(line.split())
        events.put(["quit"])

    threading.Thread(target=read_commands, daemon=True).start()
    say("ready")
    waiting: list[OutgoingFrame] = []
    while True:
        match events.get():
            case ["push", reservation, index, num_bytes]:
                frame = OutgoingFrame(
                    reservation_id=ReservationId(bytes.fromhex(reservation)),
                    frame_index=int(index),
                    num_bytes=int(num_bytes),
                    payload=frame_payload(int(index), int(num_bytes)),
                )
                waiting.append(frame)
            case ["quit"]:
                pool.close()
                return
            case FrameSent(link=link, frame_index=frame_index):
                say("sent", link.epoch, frame_index)
            case LinkDown(link=link, lost=lost):
                say("down", link.epoch, *(one.hex() for one in lost))
        while waiting and pool.has_room(target.incarnation):
            pool.push(target, waiting.pop(0))


def receive(incarnation: str, slot_bytes: str) -> None:
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    listener = LinkListener(
        host="127.0.0.1",
        incarnation=Incarnation(int(incarnation)),
        config=CONFIG,
        slot_bytes=int(slot_bytes),
        post=events.put,
    )
    endpoint = listener.endpoint()
    say("ready", endpoint.port, endpoint.token.hex())
    while True:
        match events.get():
            case FrameLanded() as landed:
                expected = frame_payload(landed.frame_index, landed.num_bytes)
                is_equal = torch.equal(listener.payload(landed), expected)
                listener.release_slot(landed)
                say("landed", landed.frame_index, landed.is_intact and is_equal)
            case LinkDown(link=link):
                say("down", link.epoch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"send": send, "receive": receive}[sys.argv[1]](*sys.argv[2:])
