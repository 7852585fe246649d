"""A `LinkDevice` without a GPU: peer memory in shared host memory, work done as it is launched.

Marks are reached at once, unless a test holds them or their lane waits for another. NCCL is a
meeting of two ends in one process.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.link_device import DeviceFault, Mark
from pdserve.cache.kv_region import KvRegion
from pdserve.cache.kv_tensors import KvTensors
from tests.support.host_peer_memory import HostOpenedBuffer, HostPeerBuffer

CPU = torch.device("cpu")


@dataclass(slots=True)
class Switches:
    """What a test breaks or holds."""

    is_holding: bool = False
    """No new mark is reached."""
    is_failing: bool = False
    """Asking a mark raises."""
    cannot_allocate: bool = False
    cannot_open: bool = False
    cannot_join: bool = False
    loses_receives: bool = False
    """A receive never ends, until the communicator is aborted."""
    steps_wait_for: list[Mark] = field(default_factory=list)
    num_aborted: int = 0
    num_open: int = 0
    """Memories that were not closed."""
    gathered: list[KvRegion] = field(default_factory=list)
    gathered_by: list[threading.Thread] = field(default_factory=list)
    """Who launched each of these."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Of all lanes of a device."""


class HostMark:
    def __init__(self, switches: Switches, is_done: Callable[[], bool] = lambda: True) -> None:
        self._switches = switches
        self._is_done = is_done
        self._is_held = switches.is_holding

    def is_reached(self) -> bool:
        if self._switches.is_failing:
            raise DeviceFault("CUDA error: an illegal memory access was encountered")
        self._is_held = self._is_held and self._switches.is_holding
        return not self._is_held and self._is_done()


class HostSum:
    def __init__(self, frame: Tensor | None = None) -> None:
        self._value: int | None = None
        if frame is not None:
            self.add_up(frame)

    def add_up(self, frame: Tensor) -> None:
        words = frame.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        weights = 2 * torch.arange(words.numel()) + 1
        plain, weighted = int(words.sum()), int((words * weights).sum())
        self._value = (weighted & 0xFFFFFFFF) << 32 | (plain & 0xFFFFFFFF)

    def value(self) -> int:
        assert self._value is not None, "read before the device had added it up"
        return self._value


class Memory:
    """Counts what was not closed."""

    def __init__(self, switches: Switches, buffer: HostPeerBuffer | HostOpenedBuffer) -> None:
        self._switches = switches
        self._buffer: HostPeerBuffer | HostOpenedBuffer | None = buffer
        self.tensor = buffer.tensor
        self.handle = buffer.handle if isinstance(buffer, HostPeerBuffer) else b""
        switches.num_open += 1

    def close(self) -> None:
        if self._buffer is not None:
            self._switches.num_open -= 1
            self._buffer.close()
        self._buffer = None


class Network:
    """Where NCCL ends meet."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.members: dict[bytes, set[int]] = {}
        self.frames: dict[bytes, list[Tensor]] = {}
        self.num_ids = 0


class HostEnd:
    def __init__(self, network: Network, nccl_id: bytes, switches: Switches) -> None:
        self.network = network
        self.nccl_id = nccl_id
        self.is_aborted = False
        self._switches = switches

    def abort(self) -> None:
        if not self.is_aborted:
            self._switches.num_aborted += 1
        self.is_aborted = True


class HostLane:
    """Does its work in order, as far as it can: when work is launched, and when a mark is asked."""

    def __init__(self, kv: KvTensors, switches: Switches) -> None:
        self._kv = kv
        self._switches = switches
        self._todo: deque[Callable[[], bool]] = deque()
        """Each says whether it is done; what is behind one that is not must wait."""
        self._num_launched = 0
        self._is_busy = False

    def gather(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> HostSum | None:
        self._switches.gathered_by.append(threading.current_thread())
        self._switches.gathered.append(region)
        self._launch(lambda: frame.copy_(self._kv.pack(region)))
        return self.add_up(frame) if has_sum else None

    def gather_to_host(self, region: KvRegion, frame: Tensor) -> None:
        self.gather(region, frame, has_sum=False)

    def scatter(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> HostSum | None:
        self._launch(lambda: self._kv.scatter(region, frame))
        return self.add_up(frame) if has_sum else None

    def add_up(self, frame: Tensor) -> HostSum:
        total = HostSum()
        self._launch(lambda: total.add_up(frame))
        return total

    def send(self, end: object, frame: Tensor) -> None:
        assert isinstance(end, HostEnd)

        def send() -> None:
            with end.network.condition:
                end.network.frames[end.nccl_id].append(frame.clone())

        self._launch(send)

    def receive(self, end: object, slot: Tensor) -> None:
        assert isinstance(end, HostEnd)
        frames = end.network.frames[end.nccl_id]

        def is_done() -> bool:
            if end.is_aborted:
                return True
            if not frames or self._switches.loses_receives:
                return False
            slot.copy_(frames.pop(0))
            return True

        self._append(is_done)

    def mark(self) -> HostMark:
        number = self._num_launched
        return HostMark(self._switches, lambda: self._has_done(number))

    def wait_for(self, mark: Mark) -> None:
        self._append(mark.is_reached)

    def entered(self) -> nullcontext[None]:
        return nullcontext()

    def _launch(self, work: Callable[[], object]) -> None:
        def do() -> bool:
            work()
            return True

        self._append(do)

    def _append(self, work: Callable[[], bool]) -> None:
        with self._switches.lock:
            self._todo.append(work)
            self._num_launched += 1
            self._go_on()

    def _has_done(self, number: int) -> bool:
        with self._switches.lock:
            self._go_on()
            return self._num_launched - len(self._todo) >= number

    def _go_on(self) -> None:
        if self._is_busy:
            return  # asked by another lane, for which this one waits
        self._is_busy = True
        try:
            while self._todo and self._todo[0]():
                self._todo.popleft()
        finally:
            self._is_busy = False


class HostDevice:
    """One rank's GPU, as links see it."""

    def __init__(
        self, kv: KvTensors, network: Network, *, uuid: str, host_id: bytes = b"host"
    ) -> None:
        self.switches = Switches()
        self.uuid = uuid
        self.host_id = host_id
        self._kv = kv
        self._network = network

    def enter_thread(self) -> None:
        pass

    def make_memory(self, num_bytes: int) -> Memory:
        if self.switches.cannot_allocate:
            raise DeviceFault("cudaMalloc failed: out of memory (2)")
        return Memory(self.switches, HostPeerBuffer(num_bytes, CPU))

    def open_memory(self, handle: bytes, num_bytes: int) -> Memory:
        if self.switches.cannot_open:
            raise DeviceFault("cudaIpcOpenMemHandle failed: invalid device context (201)")
        return Memory(self.switches, HostOpenedBuffer(handle, num_bytes, CPU))

    def make_host_frame(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def make_nccl_id(self) -> bytes:
        with self._network.condition:
            self._network.num_ids += 1
            nccl_id = b"nccl %d" % self._network.num_ids
            self._network.members[nccl_id] = set()
            self._network.frames[nccl_id] = []
            return nccl_id

    def join_nccl(
        self, nccl_id: bytes, member: int, timeout_s: float, is_given_up: Callable[[], bool]
    ) -> HostEnd:
        if self.switches.cannot_join:
            raise DeviceFault("NCCL: unhandled system error (2)")
        deadline_s = time.monotonic() + timeout_s
        with self._network.condition:
            members = self._network.members[nccl_id]
            members.add(member)
            self._network.condition.notify_all()
            while len(members) < 2:
                if is_given_up() or time.monotonic() > deadline_s:
                    raise DeviceFault(f"NCCL: the peer did not come within {timeout_s} s")
                self._network.condition.wait(0.01)
        return HostEnd(self._network, nccl_id, self.switches)

    def make_lane(self) -> HostLane:
        return HostLane(self._kv, self.switches)

    def scatter(self, region: KvRegion, payload: Tensor) -> HostMark:
        self._kv.scatter(region, payload)
        return HostMark(self.switches)

    def let_steps_wait_for(self, mark: Mark) -> None:
        self.switches.steps_wait_for.append(mark)


@contextmanager
def held(device: HostDevice) -> Iterator[None]:
    """Within, no work that is launched ends."""
    device.switches.is_holding = True
    try:
        yield
    finally:
        device.switches.is_holding = False
