"""Frames between a GPU's KV blocks and links: packed, checked and scattered beside the steps.

Work is launched on streams of its own, with priority, and never waited for. What is gathered was
computed by a step that has ended. What is scattered goes to blocks that no step in flight uses;
later steps wait for it on the device (`scatter`), the host does not.
"""

import ctypes
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pdserve.cache.kv_frame import FRAME_DTYPES
from pdserve.cache.kv_region import KvRegion
from pdserve.cache.kv_tensors import KvTensors
from pdserve.cuda.faults import DeviceFault
from pdserve.cuda.nccl import NcclPair, make_unique_id
from pdserve.cuda.peer_memory import OpenedBuffer, PeerBuffer
from pdserve.kernels.kv_pack import (
    CHECKSUM_WORDS,
    FrameRows,
    add_checksum,
    gather_frame,
    scatter_frame,
)
from pdserve.request import BlockId

_PRIORITY = -1
_SUM_PROGRAMS_PER_SM = 2
_SET_TIMER_SLACK = 29
_TIMER_SLACK_NS = 1000
_WARM_UP_BYTES = 1024
_POLL_S = 20e-6


class TrafficMark:
    """A point in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Records the present end of the stream."""
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_reached(self) -> bool:
        """Says whether the work before it is done.

        Raises:
            DeviceFault: the device failed.
        """
        try:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceFault(str(error).splitlines()[0]) from error


class TrafficSum:
    """A checksum on its way to the host."""

    def __init__(self, cells: Tensor) -> None:
        """Launches the copy of two sums, on the current stream."""
        self._host = torch.empty(CHECKSUM_WORDS, dtype=torch.int64, pin_memory=True)
        self._host.copy_(cells, non_blocking=True)

    def value(self) -> int:
        """Returns 64 bits, once a mark behind it is reached."""
        plain, weighted = (int(word) & 0xFFFFFFFF for word in self._host.tolist())
        return weighted << 32 | plain


class TrafficEnd:
    """One end of an NCCL communicator."""

    def __init__(self, pair: NcclPair) -> None:
        """Takes it over."""
        self.pair = pair

    def abort(self) -> None:
        """Ends what is under way and gives its memory back; up to a second."""
        self.pair.abort()


class TrafficLane:
    """A stream of one link's thread."""

    def __init__(self, kv: KvTensors, num_programs: int) -> None:
        """Makes the stream; `num_programs`: how many gather at a time."""
        self._kv = kv
        self._num_programs = num_programs
        self._stream = torch.cuda.Stream(kv.device, priority=_PRIORITY)  # type: ignore[no-untyped-call]

    def gather(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> TrafficSum | None:
        """Packs a region into device memory, a peer's too."""
        with torch.cuda.stream(self._stream):
            words = upload_words(self._kv, region)
            cells = words[:CHECKSUM_WORDS]
            gather_frame(
                rows_of(self._kv, region, words),
                frame,
                FRAME_DTYPES[region.dtype],
                cells if has_sum else None,
                num_programs=self._num_programs,
            )
            return TrafficSum(cells) if has_sum else None

    def gather_to_host(self, region: KvRegion, frame: Tensor) -> None:
        """Packs a region into pinned host memory."""
        with torch.cuda.stream(self._stream):
            packed = torch.empty(frame.shape, dtype=torch.uint8, device=self._kv.device)
            self.gather(region, packed, has_sum=False)
            frame.copy_(packed, non_blocking=True)

    def add_up(self, frame: Tensor) -> TrafficSum:
        """Computes a frame's checksum."""
        with torch.cuda.stream(self._stream):
            cells = torch.zeros(CHECKSUM_WORDS, dtype=torch.int64, device=self._kv.device)
            add_checksum(frame, cells, num_programs=_SUM_PROGRAMS_PER_SM * self._num_programs)
            return TrafficSum(cells)

    def send(self, end: object, frame: Tensor) -> None:
        """Sends bytes to the other end.

        Raises:
            DeviceFault: it could not be launched in time.
        """
        assert isinstance(end, TrafficEnd)
        end.pair.send(frame, self._stream)

    def receive(self, end: object, slot: Tensor) -> None:
        """Receives as many bytes as the slot has.

        Raises:
            DeviceFault: it could not be launched in time.
        """
        assert isinstance(end, TrafficEnd)
        end.pair.receive(slot, self._stream)

    def mark(self) -> TrafficMark:
        """Marks the present end of the stream."""
        return TrafficMark(self._stream)

    def wait_for(self, mark: object) -> None:
        """Lets later work wait for another stream's mark."""
        assert isinstance(mark, TrafficMark)
        self._stream.wait_event(mark.event)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets torch's operations within join the stream."""
        with torch.cuda.stream(self._stream):
            yield


class KvTraffic:
    """The `LinkDevice` of a CUDA GPU that holds a rank's KV."""

    def __init__(self, kv: KvTensors, *, nccl_max_ctas: int) -> None:
        """Makes the engine's stream and compiles the kernels."""
        self._kv = kv
        self._nccl_max_ctas = nccl_max_ctas
        properties = torch.cuda.get_device_properties(kv.device)
        # One each: beside matrix products no slower than few, and alone the fastest (H200).
        self._num_programs: int = properties.multi_processor_count
        self._uuid = str(properties.uuid)
        self._host_id = read_host_id()
        self._landing = torch.cuda.Stream(kv.device, priority=_PRIORITY)  # type: ignore[no-untyped-call]
        self._warm_up()

    @property
    def host_id(self) -> bytes:
        """Equal in processes that can open each other's memory."""
        return self._host_id

    @property
    def uuid(self) -> str:
        """Of the GPU."""
        return self._uuid

    def enter_thread(self) -> None:
        """Makes it the calling thread's device, and short sleeps of that thread short."""
        torch.cuda.set_device(self._kv.device)
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, _TIMER_SLACK_NS)

    def make_memory(self, num_bytes: int) -> PeerBuffer:
        """Allocates beside torch's pool.

        Raises:
            DeviceFault: there is not that much left.
        """
        return PeerBuffer(num_bytes, self._kv.device)

    def open_memory(self, handle: bytes, num_bytes: int) -> OpenedBuffer:
        """Maps a peer's memory.

        Raises:
            DeviceFault: the peer is gone, or out of reach.
        """
        return OpenedBuffer(handle, num_bytes, self._kv.device)

    def make_host_frame(self, num_bytes: int) -> Tensor:
        """Returns pinned host memory, which torch keeps for the next frame."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def make_nccl_id(self) -> bytes:
        """Returns a name for a new communicator.

        Raises:
            DeviceFault: there is no NCCL.
        """
        return make_unique_id()

    def join_nccl(
        self, nccl_id: bytes, member: int, timeout_s: float, is_given_up: Callable[[], bool]
    ) -> TrafficEnd:
        """Meets the other member, and sends a first message, for which NCCL connects.

        Raises:
            DeviceFault: it did not come in time.
        """
        pair = NcclPair(
            nccl_id,
            member,
            self._kv.device,
            max_ctas=self._nccl_max_ctas,
            timeout_s=timeout_s,
            is_given_up=is_given_up,
        )
        end, lane = TrafficEnd(pair), self.make_lane()
        try:
            with lane.entered():
                scrap = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self._kv.device)
            (lane.send if member == 0 else lane.receive)(end, scrap)
            done, deadline_s = lane.mark(), time.monotonic() + timeout_s
            while not done.is_reached():
                if is_given_up() or time.monotonic() > deadline_s:
                    raise DeviceFault(f"NCCL: no first message within {timeout_s} s")
                time.sleep(_POLL_S)
        except DeviceFault:
            end.abort()
            raise
        return end

    def make_lane(self) -> TrafficLane:
        """Returns a new stream."""
        return TrafficLane(self._kv, self._num_programs)

    def scatter(self, region: KvRegion, payload: Tensor) -> TrafficMark:
        """Writes a frame to the rank's blocks; later steps of the engine wait for it.

        Engine thread only.

        Raises:
            ValueError: the frame does not fit the region.
        """
        self._kv.check_target(region, payload)
        with torch.cuda.stream(self._landing):
            frame = payload.to(self._kv.device, non_blocking=True)
            scatter_frame(
                rows_of(self._kv, region, upload_words(self._kv, region)),
                frame,
                FRAME_DTYPES[region.dtype],
                num_programs=self._num_programs,
            )
        mark = TrafficMark(self._landing)
        self.let_steps_wait_for(mark)
        return mark

    def let_steps_wait_for(self, mark: object) -> None:
        """Lets later steps of the engine begin after a mark. Engine thread only."""
        assert isinstance(mark, TrafficMark)
        torch.cuda.current_stream(self._kv.device).wait_event(mark.event)

    def _warm_up(self) -> None:
        """Compiles the kernels on the first block, whose values stay as they are."""
        kv = self._kv
        region = KvRegion(
            block_ids=(BlockId(0),),
            offset=0,
            num_tokens=kv.geometry.block_size,
            layers=kv.part.layers,
            heads=kv.part.kv_heads,
            dtype=kv.geometry.dtype,
        )
        lane = self.make_lane()
        with lane.entered():
            frame = torch.empty(kv.frame_bytes(region), dtype=torch.uint8, device=kv.device)
        for has_sum in (False, True):
            lane.gather(region, frame, has_sum=has_sum)
        lane.add_up(frame)
        self._landing.wait_event(lane.mark().event)
        self.scatter(region, frame)
        torch.cuda.synchronize(kv.device)


def upload_words(kv: KvTensors, region: KvRegion) -> Tensor:
    """Brings a zeroed checksum and a region's block ids to the device, in one copy.

    On the current stream; int64 [2 + num_blocks].
    """
    words = [*(0,) * CHECKSUM_WORDS, *region.block_ids]
    host = torch.tensor(words, dtype=torch.int64, pin_memory=kv.device.type != "cpu")
    return host.to(kv.device, non_blocking=True)


def rows_of(kv: KvTensors, region: KvRegion, words: Tensor) -> FrameRows:
    """Returns what a kernel needs of a region.

    Raises:
        ValueError: the region reaches beyond this rank's memory.
    """
    return FrameRows(
        values=kv.view(region),
        block_ids=words[CHECKSUM_WORDS:],
        offset=region.offset,
        num_tokens=region.num_tokens,
    )


def read_host_id() -> bytes:
    """Returns a digest that is equal in processes of one kernel and one IPC namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return hashlib.sha256(boot_id + os.readlink("/proc/self/ns/ipc").encode()).digest()
