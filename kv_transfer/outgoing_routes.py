"""How frames leave a GPU: straight into the peer's landing ring, or through NCCL.

    push:  slot granted (POSTED) -> gathered into it, READY -> WRITTEN
    nccl:  slot granted -> gathered into a staging buffer, READY -> sent -> WRITTEN

The peer grants its slots beforehand, so a frame waits for no answer. An NCCL receive occupies the
peer's GPU while it waits: it is launched only when READY tells that its frame is about to be sent.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kv_transfer.faults import FrameFaults
from kv_transfer.link_device import DeviceMemory, FrameSum, Lane, LinkDevice, Mark, NcclEnd
from kv_transfer.notices import LinkBroken
from kv_transfer.transport import OutgoingFrame
from pdserve.cache.kv_marks import KvMark
from pdserve.cache.kv_region import KvRegion
from pdserve.config.link_memory import NUM_STAGED
from pdserve.rpc.v1 import link_pb2


@dataclass(slots=True, eq=False, kw_only=True)
class Flight:
    """A frame under way."""

    frame: OutgoingFrame
    region: KvRegion
    sequence: int
    since_s: float
    """When its present stage began."""
    slot: int = 0
    """Of the peer's ring."""
    staged: int = 0
    """Of the staging buffers."""
    packed: Tensor | None = None
    checksum: FrameSum | None = None
    read: Mark | None = None
    """Behind the last reading of its blocks."""
    done: Mark | None = None
    """Behind all that this end has to do."""
    expected_at_s: float = 0.0
    """When it may be done, at the earliest."""
    readable_at_s: float = 0.0
    """When its blocks could be read."""
    awaited: KvMark | None = None
    """What its blocks are computed by; None once that was reached."""
    is_announced: bool = False


class Packer:
    """Packs frames, with a checksum and the faults that are injected on purpose."""

    def __init__(self, faults: FrameFaults, *, has_checksums: bool) -> None:
        """Keeps both."""
        self.delay_s = faults.delay_s
        """Added before each frame."""
        self._faults = faults
        self._has_checksums = has_checksums

    def pack(self, lane: Lane, flight: Flight, target: Tensor) -> None:
        """Launches the packing of a frame into `target`, behind what computes it."""
        if flight.awaited is not None:
            lane.wait_for(flight.awaited)
        number = self._faults.count()
        is_spoilt = self._faults.spoils_silently(number)
        has_sum = self._has_checksums and not is_spoilt
        flight.packed = target
        flight.checksum = lane.gather(flight.region, target, has_sum=has_sum)
        if is_spoilt:
            with lane.entered():
                self._faults.spoil_before_checksum(number, target)
            flight.checksum = lane.add_up(target) if self._has_checksums else None
        if self._faults.spoils_visibly(number):
            with lane.entered():
                self._faults.spoil_after_checksum(number, target)


class OutRoute(Protocol):
    """What a transport does for a sender. One thread at a time."""

    transport: str
    goes_on: bool
    """A frame that has begun needs another launch (`advance`)."""

    def has_room(self) -> bool:
        """Says whether another frame may begin."""
        ...

    def begin(self, flight: Flight, packer: Packer) -> None:
        """Launches the reading of a frame's blocks."""
        ...

    def take_posted(self, posted: link_pb2.FramePosted) -> None:
        """Takes a slot that is free at the peer."""
        ...

    def advance(self, flight: Flight) -> bool:
        """Launches what has become possible; says whether there was something."""
        ...

    def finish(self, flight: Flight) -> None:
        """Takes back what a frame occupied here."""
        ...

    def abort(self) -> None:
        """Ends what may hang."""
        ...

    def close(self) -> None:
        """Gives all memory back; nothing may be under way."""
        ...


class GrantedSlots:
    """The slots that a peer lets us write, in the order of its word."""

    def __init__(self, num_slots: int) -> None:
        """Starts with none."""
        self._num_slots = num_slots
        self._slots: deque[int] = deque()

    @property
    def next(self) -> int | None:
        """The one that the next frame gets; None: there is none."""
        return self._slots[0] if self._slots else None

    def take(self) -> int:
        """Takes it."""
        return self._slots.popleft()

    def add(self, posted: link_pb2.FramePosted) -> None:
        """Adds one.

        Raises:
            LinkBroken: there is no such slot, or we have it.
        """
        slot = posted.slot
        if slot >= self._num_slots or slot in self._slots:
            raise LinkBroken(f"slot {slot} was granted, which is none or is granted already")
        self._slots.append(slot)


class PushRoute:
    """Gathers into the peer's ring."""

    transport = "push"
    goes_on = False

    def __init__(self, device: LinkDevice, ring: DeviceMemory, num_slots: int) -> None:
        """Takes over the opened ring; the peer grants its slots."""
        self._ring = ring
        self._slots = ring.tensor.view(num_slots, -1).unbind(0)
        self._lane = device.make_lane()
        self._granted = GrantedSlots(num_slots)

    def has_room(self) -> bool:
        """True while the peer has a slot for us."""
        return self._granted.next is not None

    def begin(self, flight: Flight, packer: Packer) -> None:
        """Launches the one kernel."""
        assert self._granted.next is not None
        target = cut_slot(self._slots[self._granted.next], flight.frame.num_bytes)
        flight.slot = self._granted.take()
        packer.pack(self._lane, flight, target)
        flight.read = flight.done = self._lane.mark()

    def take_posted(self, posted: link_pb2.FramePosted) -> None:
        """Takes a slot that is free at the peer."""
        self._granted.add(posted)

    def advance(self, flight: Flight) -> bool:
        """Does nothing: one launch is all."""
        return False

    def finish(self, flight: Flight) -> None:
        """Leaves the slot with the peer."""

    def abort(self) -> None:
        """Does nothing: a gather ends by itself, whatever the peer does."""

    def close(self) -> None:
        """Unmaps the ring."""
        self._ring.close()


class NcclRoute:
    """Gathers into staging buffers and sends them."""

    transport = "nccl"
    goes_on = True

    def __init__(self, device: LinkDevice, end: NcclEnd, num_slots: int, slot_bytes: int) -> None:
        """Takes over the communicator's end.

        Raises:
            DeviceFault: there is no memory for the staging buffers.
        """
        self._end = end
        self._memory = device.make_memory(NUM_STAGED * slot_bytes)
        self._staged = self._memory.tensor.view(NUM_STAGED, -1).unbind(0)
        self._packing, self._sending = device.make_lane(), device.make_lane()
        self._free = deque(range(NUM_STAGED))
        self._granted = GrantedSlots(num_slots)

    def has_room(self) -> bool:
        """True while a staging buffer is free, and a slot of the peer."""
        return bool(self._free) and self._granted.next is not None

    def begin(self, flight: Flight, packer: Packer) -> None:
        """Launches the packing."""
        target = cut_slot(self._staged[self._free[0]], flight.frame.num_bytes)
        flight.slot, flight.staged = self._granted.take(), self._free.popleft()
        packer.pack(self._packing, flight, target)
        flight.read = self._packing.mark()

    def take_posted(self, posted: link_pb2.FramePosted) -> None:
        """Takes a slot that is free at the peer."""
        self._granted.add(posted)

    def advance(self, flight: Flight) -> bool:
        """Launches the sending; the link's thread, as it may have to wait for the peer."""
        if flight.done is not None or flight.packed is None or flight.read is None:
            return False
        self._sending.wait_for(flight.read)
        self._sending.send(self._end, flight.packed)
        flight.done = self._sending.mark()
        return True

    def finish(self, flight: Flight) -> None:
        """Frees the staging buffer."""
        self._free.append(flight.staged)

    def abort(self) -> None:
        """Aborts the communicator: a send whose peer is gone never ends by itself."""
        self._end.abort()

    def close(self) -> None:
        """Frees the staging buffers."""
        self._memory.close()


def cut_slot(slot: Tensor, num_bytes: int) -> Tensor:
    """Returns the first bytes of a slot.

    Raises:
        LinkBroken: it has not as many.
    """
    if num_bytes > slot.numel():
        raise LinkBroken(f"a frame of {num_bytes} bytes for {slot.numel()}")
    return slot if num_bytes == slot.numel() else slot[:num_bytes]
