"""A prefill rank over a `HostDevice` in a process of its own, which pushes frames without a pause.

    python -m tests.support.device_link_peer PORT TOKEN_HEX PEER_INCARNATION INCARNATION

It prints `down` when its link has ended, and then waits to be killed.
"""

import queue
import sys

import torch

from kv_transfer.events import LinkDown, LinkEvent
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import LinkPeer, OutgoingFrame
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, ReservationId, WorkerId
from tests.support.host_device import HostDevice, Network
from tests.support.kv import fill, whole_blocks

GEOMETRY = KvGeometry(
    num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32", model_revision="r"
)
NUM_BLOCKS = 32
CONFIG = HandoffConfig(
    transports=("push",), ring_slots=2, frame_timeout_s=3.0, connect_timeout_s=3.0
)
SEED = 1


def make_kv() -> KvTensors:
    return fill(KvTensors(GEOMETRY, NUM_BLOCKS), SEED)


def main(port: str, token: str, peer: str, incarnation: str) -> None:
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    kv = make_kv()
    me = SenderIdentity(
        worker_id=WorkerId("p"), incarnation=Incarnation(int(incarnation)), host="127.0.0.1"
    )
    device = HostDevice(kv, Network(), uuid="gpu 0")
    pool = LinkPool(me=me, config=CONFIG, post=events.put, device=device)
    endpoint = LinkEndpoint(host="127.0.0.1", port=int(port), token=bytes.fromhex(token))
    target = LinkPeer(
        worker_id=WorkerId("d"), incarnation=Incarnation(int(peer)), endpoint=endpoint
    )
    region = whole_blocks(kv, range(NUM_BLOCKS))
    index = 0
    while True:
        while pool.has_room(target.incarnation):
            frame = OutgoingFrame(
                reservation_id=ReservationId(b"r"),
                frame_index=index,
                num_bytes=kv.frame_bytes(region),
                payload=region,
            )
            pool.push(target, frame)
            index += 1
        if isinstance(events.get(), LinkDown):
            break
    # A frame pushed before the news of the end was read has made a link anew.
    pool.close()
    sys.stdout.write("down\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
