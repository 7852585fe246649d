"""A rank with links on a GPU, without an engine: a process driven over a pipe.

Both sides use what workers use: `KvTraffic`, `LinkPool`, `LinkListener`, `RankShipper` and
`RankUnloader`. Frames follow one table of blocks; the decode side says when the last one is
scattered.
"""

import hashlib
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_transfer.device_choice import find_link_device
from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEnds
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.receiver import LinkListener
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.shipping import RankShipper, RankUnloader, ShipFrame, UnloadFrame
from kv_transfer.transport import LinkPeer
from pdserve.cache.kv_region import KvRegion, make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.link_memory import link_slot_bytes, settle_frames
from pdserve.config.model import KvGeometry
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import BlockId, Incarnation, ReservationId, WorkerId

LLAMA_8B = KvGeometry(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype="bfloat16",
    model_revision="random",
)
START_TIMEOUT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What a rank is started with."""

    incarnation: int
    geometry: KvGeometry = LLAMA_8B
    num_blocks: int = 512
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)


class GpuRank:
    """The parent's end of a rank process."""

    def __init__(self, settings: RankSettings, gpu: str) -> None:
        """Starts it; `gpu` is all that its process sees, as CUDA_VISIBLE_DEVICES names it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            self._process = context.Process(target=_live, args=(settings, theirs), daemon=True)
            self._process.start()
        finally:
            if visible is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
        theirs.close()

    def wait_ready(self) -> None:
        assert self._receive(START_TIMEOUT_S) == "ready"

    def begin(self, name: str, **arguments: object) -> None:
        self._pipe.send((name, arguments))

    def end(self, timeout_s: float = 30.0) -> Any:
        return self._receive(timeout_s)

    def call(self, name: str, timeout_s: float = 30.0, **arguments: object) -> Any:
        self.begin(name, **arguments)
        return self.end(timeout_s)

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value


def _live(settings: RankSettings, pipe: Connection) -> None:
    try:
        rank = _Rank(settings)
        pipe.send(("value", "ready"))
        while True:
            name, arguments = pipe.recv()
            pipe.send(("value", rank.commands[name](**arguments)))
    except EOFError:
        return
    except BaseException:
        pipe.send(("error", traceback.format_exc()[-3000:]))
        raise


class _Rank:
    """The only thread that touches blocks, as an engine's."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        torch.cuda.set_device(0)
        torch.cuda.set_stream(torch.cuda.Stream())
        self._kv = KvTensors(settings.geometry, settings.num_blocks, device=torch.device("cuda", 0))
        for layer in range(settings.geometry.num_layers):
            for half in self._kv.layer(layer):
                half.normal_()
        device = find_link_device(self._kv, settings.handoff)
        assert device is not None
        self._device = device
        handoff, geometry = settings.handoff, settings.geometry
        self._frame_tokens = settle_frames(handoff, geometry, is_on_gpu=True).whole.tokens
        me = SenderIdentity(
            worker_id=WorkerId("p"),
            incarnation=Incarnation(settings.incarnation),
            host="127.0.0.1",
        )
        pool = LinkPool(
            me=me,
            config=handoff,
            post=self._inbox.put,
            faults=settings.faults,
            device=device,
        )
        self._pool = pool
        self._shipper = RankShipper(self._kv, pool, device)
        self._listener = LinkListener(
            host="127.0.0.1",
            incarnation=Incarnation(settings.incarnation),
            config=handoff,
            slot_bytes=link_slot_bytes(handoff, geometry, 0, is_on_gpu=True),
            post=self._inbox.put,
            device=device,
        )
        self._unloader = RankUnloader(self._kv, self._listener, device)
        self.commands = {
            "endpoint": self._listener.endpoint,
            "frame_tokens": lambda: self._frame_tokens,
            "push": self.push,
            "receive": self.receive,
            "push_until_down": self.push_until_down,
            "receive_until_down": self.receive_until_down,
            "drain": self.drain,
            "digest": self.digest,
            "status": lambda: [(link.transport, link.failures) for link in self._links()],
            "memory": self.free_mib,
            "compute": self.compute,
            "threads": threading.active_count,
        }

    def push(
        self, endpoint: LinkEndpoint, peer: int, table: list[int], num_tokens: int
    ) -> tuple[float, float]:
        """Ships a sequence; returns when it began, and when the last frame was sent."""
        target = self._peer(endpoint, peer)
        regions = self._regions(table, num_tokens)
        begun_at_s = time.monotonic()
        for index, region in enumerate(regions):
            while not self._shipper.has_room(LinkEnds(target.incarnation, 0, 0)):
                self._take_sent()
            self._ship(target, b"r", index, region)
        for _ in regions:
            self._take_sent()
        return begun_at_s, time.monotonic()

    def receive(self, table: list[int], num_tokens: int) -> tuple[float, bool]:
        """Unloads a sequence; returns when it was scattered, and whether all were intact."""
        regions = self._regions(table, num_tokens)
        are_intact = True
        for _ in regions:
            landed = self._inbox.get(timeout=20)
            assert isinstance(landed, FrameLanded), landed
            are_intact &= landed.is_intact
            self._unloader.unload(UnloadFrame(landed=landed, region=regions[landed.frame_index]))
        # Steps wait for the scatter on the device: so does this.
        torch.cuda.current_stream().synchronize()
        return time.monotonic(), are_intact

    def push_until_down(self, endpoint: LinkEndpoint, peer: int, table: list[int]) -> float:
        """Ships for ever; returns when the link's death was heard of."""
        target = self._peer(endpoint, peer)
        regions = self._regions(table, len(table) * self._settings.geometry.block_size)
        index = 0
        while True:
            if self._shipper.has_room(LinkEnds(target.incarnation, 0, 0)):
                self._ship(target, b"r", index, regions[index % len(regions)])
                index += 1
                continue
            event = self._inbox.get(timeout=20)
            if isinstance(event, LinkDown):
                return time.monotonic()

    def receive_until_down(self, table: list[int]) -> float:
        """Unloads for ever; returns when the link's death was heard of."""
        regions = self._regions(table, len(table) * self._settings.geometry.block_size)
        while True:
            event = self._inbox.get(timeout=20)
            if isinstance(event, LinkDown):
                return time.monotonic()
            assert isinstance(event, FrameLanded)
            region = regions[event.frame_index % len(regions)]
            self._unloader.unload(UnloadFrame(landed=event, region=region))

    def drain(self) -> int:
        """Forgets what links reported; returns how much that was."""
        count = 0
        while not self._inbox.empty():
            self._inbox.get()
            count += 1
        return count

    def digest(self, table: list[int], num_tokens: int) -> str:
        """Returns a digest of a sequence's values."""
        digest = hashlib.sha256()
        for region in self._regions(table, num_tokens):
            digest.update(self._kv.pack(region).numpy().data)
        return digest.hexdigest()

    def free_mib(self) -> int:
        """Returns what is free of the GPU."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] >> 20

    def compute(self) -> float:
        """Does a little work; returns a known sum."""
        ones = torch.ones(256, 256, device="cuda")
        return float((ones @ ones).sum())

    def _links(self) -> list[Any]:
        return [*self._pool.links(), *self._listener.links()]

    def _ship(self, target: LinkPeer, reservation: bytes, index: int, region: KvRegion) -> None:
        order = ShipFrame(
            prefill_rank=0,
            peer=target,
            reservation_id=ReservationId(reservation),
            frame_index=index,
            region=region,
        )
        self._shipper.ship(order)

    def _take_sent(self) -> None:
        event = self._inbox.get(timeout=20)
        assert isinstance(event, FrameSent), event

    def _peer(self, endpoint: LinkEndpoint, peer: int) -> LinkPeer:
        return LinkPeer(worker_id=WorkerId("d"), incarnation=Incarnation(peer), endpoint=endpoint)

    def _regions(self, table: list[int], num_tokens: int) -> list[KvRegion]:
        part, geometry = self._kv.part, self._settings.geometry
        wire_dtype = self._settings.handoff.wire_dtype
        return [
            make_region(
                table=tuple(BlockId(block) for block in table),
                block_size=geometry.block_size,
                tokens=range(start, min(start + self._frame_tokens, num_tokens)),
                layers=part.layers,
                heads=part.kv_heads,
                dtype=geometry.dtype if wire_dtype == "auto" else wire_dtype,
            )
            for start in range(0, num_tokens, self._frame_tokens)
        ]
