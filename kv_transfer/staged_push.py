"""A push in two moves: gathered into a staging buffer, then copied into the peer's ring.

Gathering goes at the speed of the GPU's own memory, and the copy needs none of its processors: a
step beside it loses a fraction of what it loses to a gather that waits for the link.
"""

from kv_transfer.link_device import DeviceMemory, LinkDevice, Mark
from kv_transfer.outgoing_routes import Flight, GrantedSlots, Packer, cut_slot
from pdserve.config.link_memory import NUM_STAGED
from pdserve.rpc.v1 import link_pb2


class StagedPushRoute:
    """Gathers, and copies into the peer's ring."""

    transport = "push"
    goes_on = False

    def __init__(self, device: LinkDevice, ring: DeviceMemory, num_slots: int) -> None:
        """Takes over the opened ring; the peer grants its slots.

        Raises:
            DeviceFault: there is no memory for the staging buffers.
        """
        self._ring = ring
        self._slots = ring.tensor.view(num_slots, -1).unbind(0)
        self._memory = device.make_memory(NUM_STAGED * self._slots[0].numel())
        self._staged = self._memory.tensor.view(NUM_STAGED, -1).unbind(0)
        self._copied: list[Mark | None] = [None] * NUM_STAGED
        """Behind the last copy out of each buffer."""
        self._packing, self._copying = device.make_lane(), device.make_lane()
        self._granted = GrantedSlots(num_slots)
        self._num_begun = 0

    def has_room(self) -> bool:
        """True while the peer has a slot for us: staging buffers are waited for on the device."""
        return self._granted.next is not None

    def begin(self, flight: Flight, packer: Packer) -> None:
        """Launches both moves."""
        assert self._granted.next is not None
        target = cut_slot(self._slots[self._granted.next], flight.frame.num_bytes)
        flight.slot = self._granted.take()
        buffer = self._num_begun % NUM_STAGED
        self._num_begun += 1
        before = self._copied[buffer]
        if before is not None:
            self._packing.wait_for(before)
        staged = cut_slot(self._staged[buffer], flight.frame.num_bytes)
        packer.pack(self._packing, flight, staged)
        flight.read = self._packing.mark()
        self._copying.wait_for(flight.read)
        self._copying.copy(staged, target)
        flight.done = self._copied[buffer] = self._copying.mark()

    def take_posted(self, posted: link_pb2.FramePosted) -> None:
        """Takes a slot that is free at the peer."""
        self._granted.add(posted)

    def advance(self, flight: Flight) -> bool:
        """Does nothing: all is launched at once."""
        return False

    def finish(self, flight: Flight) -> None:
        """Leaves the slot with the peer."""

    def abort(self) -> None:
        """Does nothing: copies end by themselves, whatever the peer does."""

    def close(self) -> None:
        """Unmaps the ring and frees the staging buffers."""
        self._ring.close()
        self._memory.close()
