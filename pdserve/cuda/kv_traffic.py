"""Frames between a GPU's KV blocks and links: packed, checked and scattered beside the steps.

Work is launched on streams of its own, with priority, and never waited for by the host. What is
gathered was computed by a step that has ended, or by one that is waited for on the device
(`TrafficLane.wait_for`). What is scattered goes to blocks that no step in flight uses; later steps
wait for it on the device, too (`KvTraffic.scatter`).
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
from pdserve.cuda.marks import TrafficMark
from pdserve.cuda.nccl import NcclPair, make_unique_id
from pdserve.cuda.peer_memory import OpenedBuffer, PeerBuffer
from pdserve.cuda.traffic_rows import FrameSums, SumRows, UploadRows
from pdserve.kernels.kv_pack import FrameAdder, FramePacker
from pdserve.request import BlockId

_PRIORITY = -1
_SUM_PROGRAMS_PER_SM = 2
_SET_TIMER_SLACK = 29
_TIMER_SLACK_NS = 1000
_WARM_UP_BYTES = 1024
_POLL_S = 20e-6


class TrafficEnd:
    """One end of an NCCL communicator."""

    def __init__(self, pair: NcclPair) -> None:
        """Takes it over."""
        self.pair = pair

    def abort(self) -> None:
        """Ends what is under way and gives its memory back; up to a second."""
        self.pair.abort()


class Packers:
    """The packers of a rank's blocks, made as frames ask for them. Any thread may ask."""

    def __init__(self, kv: KvTensors, num_programs: int) -> None:
        """Starts with none."""
        self._kv = kv
        self._num_programs = num_programs
        self._made: dict[tuple[range, range, str], FramePacker] = {}

    def check_target(self, region: KvRegion, frame: Tensor) -> None:
        """Checks that a frame may be written to a region.

        Raises:
            ValueError: it does not fit.
        """
        self._kv.check_target(region, frame)

    def find(self, region: KvRegion) -> FramePacker:
        """Returns the one for a region's layers, heads and dtype.

        Raises:
            ValueError: the region reaches beyond this rank's memory.
        """
        self._kv.check_region(region)
        key = (region.layers, region.heads, region.dtype)
        packer = self._made.get(key)
        if packer is None:
            values, dtype = self._kv.view(region), FRAME_DTYPES[region.dtype]
            packer = self._made[key] = FramePacker(values, dtype, self._num_programs)
        return packer


class TrafficLane:
    """A stream of one link. One thread at a time."""

    def __init__(self, device: torch.device, packers: Packers, adder: FrameAdder) -> None:
        """Makes the stream, and rows for ids and sums."""
        self._device = device
        self._packers = packers
        self._stream = torch.cuda.Stream(device, priority=_PRIORITY)  # type: ignore[no-untyped-call]
        self._handle: int = self._stream.cuda_stream
        self._uploads, self._sums = UploadRows(device), SumRows(device, adder.num_programs)
        self._adder = adder
        self._last: TrafficMark | None = None
        """Behind everything; None once something was launched after it."""

    def gather(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> FrameSums | None:
        """Packs a region into device memory, a peer's too."""
        return self._move(region, frame, self._packers.find(region).gather, has_sum=has_sum)

    def scatter(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> FrameSums | None:
        """Writes a frame to a region's blocks."""
        self._packers.check_target(region, frame)
        return self._move(region, frame, self._packers.find(region).scatter, has_sum=has_sum)

    def _move(
        self,
        region: KvRegion,
        frame: Tensor,
        launch: Callable[[Tensor, range, Tensor, Tensor | None, int], int],
        *,
        has_sum: bool,
    ) -> FrameSums | None:
        self._last = None
        ids = self._uploads.upload(region.block_ids, self._handle)
        sums = self._sums.take() if has_sum else None
        num_programs = launch(ids, tokens_of(region), frame, sums, self._handle)
        self._uploads.note_used(self.mark())
        return self._sums.sums(num_programs) if has_sum else None

    def gather_to_host(self, region: KvRegion, frame: Tensor) -> None:
        """Packs a region into pinned host memory."""
        with torch.cuda.stream(self._stream):
            packed = torch.empty(frame.shape, dtype=torch.uint8, device=self._device)
            self.gather(region, packed, has_sum=False)
            self._last = None
            frame.copy_(packed, non_blocking=True)

    def add_up(self, frame: Tensor) -> FrameSums:
        """Computes a frame's checksum."""
        self._last = None
        num_programs = self._adder.add_up(frame, self._sums.take(), self._handle)
        return self._sums.sums(num_programs)

    def send(self, end: object, frame: Tensor) -> None:
        """Sends bytes to the other end.

        Raises:
            DeviceFault: it could not be launched in time.
        """
        assert isinstance(end, TrafficEnd)
        self._last = None
        end.pair.send(frame, self._stream)

    def receive(self, end: object, slot: Tensor) -> None:
        """Receives as many bytes as the slot has.

        Raises:
            DeviceFault: it could not be launched in time.
        """
        assert isinstance(end, TrafficEnd)
        self._last = None
        end.pair.receive(slot, self._stream)

    def mark(self) -> TrafficMark:
        """Marks the present end of the stream."""
        if self._last is None:
            self._last = TrafficMark(self._stream)
        return self._last

    def wait_for(self, mark: object) -> None:
        """Lets later work wait for another stream's mark."""
        assert isinstance(mark, TrafficMark)
        self._stream.wait_event(mark.event)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets torch's operations within join the stream."""
        self._last = None
        with torch.cuda.stream(self._stream):
            yield


class KvTraffic:
    """The `LinkDevice` of a CUDA GPU that holds a rank's KV."""

    def __init__(
        self, kv: KvTensors, *, nccl_max_ctas: int, pack_programs: int | None = None
    ) -> None:
        """Makes the engine's stream and compiles the kernels."""
        self._kv = kv
        self._nccl_max_ctas = nccl_max_ctas
        properties = torch.cuda.get_device_properties(kv.device)
        # One each: beside matrix products no slower than few, and alone the fastest (H200).
        num_programs: int = properties.multi_processor_count
        self._adder = FrameAdder(_SUM_PROGRAMS_PER_SM * num_programs)
        self._packers = Packers(kv, pack_programs or num_programs)
        self._uuid = str(properties.uuid)
        self._host_id = read_host_id()
        self._landing = self.make_lane()
        """Of frames that the engine's thread scatters."""
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
        return TrafficLane(self._kv.device, self._packers, self._adder)

    def scatter(self, region: KvRegion, payload: Tensor) -> TrafficMark:
        """Writes a frame to the rank's blocks; later steps of the engine wait for it.

        Engine thread only.

        Raises:
            ValueError: the frame does not fit the region.
        """
        if payload.device != self._kv.device:
            with self._landing.entered():
                payload = payload.to(self._kv.device, non_blocking=True)
        self._landing.scatter(region, payload, has_sum=False)
        mark = self._landing.mark()
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
            lane.scatter(region, frame, has_sum=has_sum)
        lane.add_up(frame)
        self._landing.wait_for(lane.mark())
        self.scatter(region, frame)
        torch.cuda.synchronize(kv.device)


def tokens_of(region: KvRegion) -> range:
    """Returns a region's slots, counted from its first block's first."""
    return range(region.offset, region.offset + region.num_tokens)


def read_host_id() -> bytes:
    """Returns a digest that is equal in processes of one kernel and one IPC namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return hashlib.sha256(boot_id + os.readlink("/proc/self/ns/ipc").encode()).digest()
