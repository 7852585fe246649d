"""What links need of a rank's GPU: memory that peers can reach, and work in order.

The seam between links and CUDA (`pdserve.cuda.kv_traffic`); tests put host memory behind it. Work
is launched and goes on by itself; a `Mark` set behind it tells when it is done.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from pdserve.cache.kv_region import KvRegion
from pdserve.cuda.faults import DeviceFault

__all__ = [
    "DeviceFault",
    "DeviceMemory",
    "FrameSum",
    "Lane",
    "LinkDevice",
    "Mark",
    "NcclEnd",
    "OwnMemory",
]


class Mark(Protocol):
    """A point in a device's work."""

    def is_reached(self) -> bool:
        """Says whether the work before it is done.

        Raises:
            DeviceFault: the work failed.
        """
        ...


class FrameSum(Protocol):
    """A checksum that the device computes; valid once a mark behind it is reached."""

    def value(self) -> int:
        """Returns it, 64 bits."""
        ...


class DeviceMemory(Protocol):
    """Memory beside torch's own pool, so that closing it gives it back at once."""

    @property
    def tensor(self) -> Tensor:
        """uint8; not to be used once closed."""
        ...

    def close(self) -> None:
        """Gives it back; no work may use it any more. May be repeated."""
        ...


class OwnMemory(DeviceMemory, Protocol):
    """Memory of this process, which peers may open."""

    @property
    def handle(self) -> bytes:
        """What a peer opens it with."""
        ...


class NcclEnd(Protocol):
    """One end of an NCCL communicator of two."""

    def abort(self) -> None:
        """Ends what is under way, whatever the peer does, and gives its memory back."""
        ...


class Lane(Protocol):
    """Work of one link, done in the order of the calls. One thread."""

    def gather(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> FrameSum | None:
        """Packs a region of the rank's blocks into device memory."""
        ...

    def gather_to_host(self, region: KvRegion, frame: Tensor) -> None:
        """Packs a region of the rank's blocks into pinned host memory."""
        ...

    def scatter(self, region: KvRegion, frame: Tensor, *, has_sum: bool) -> FrameSum | None:
        """Writes a frame in device memory to a region of the rank's blocks, all different."""
        ...

    def add_up(self, frame: Tensor) -> FrameSum:
        """Computes a frame's checksum."""
        ...

    def send(self, end: NcclEnd, frame: Tensor) -> None:
        """Sends bytes to the other end.

        Raises:
            DeviceFault: it could not be launched in time.
        """
        ...

    def receive(self, end: NcclEnd, slot: Tensor) -> None:
        """Receives as many bytes as the slot has.

        Raises:
            DeviceFault: it could not be launched in time.
        """
        ...

    def mark(self) -> Mark:
        """Marks the present end of the work."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Lets later work of this lane wait for a mark of another."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Lets torch's own operations within join the lane."""
        ...


class LinkDevice(Protocol):
    """A rank's GPU. Methods may be called from any thread, but for the last two."""

    @property
    def host_id(self) -> bytes:
        """Equal in processes that can open each other's memory."""
        ...

    @property
    def uuid(self) -> str:
        """Of the GPU."""
        ...

    def enter_thread(self) -> None:
        """Makes it the calling thread's device; each link's thread does so first."""
        ...

    def make_memory(self, num_bytes: int) -> OwnMemory:
        """Allocates.

        Raises:
            DeviceFault: there is not that much left.
        """
        ...

    def open_memory(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Maps a peer's memory.

        Raises:
            DeviceFault: the peer is gone, or out of reach.
        """
        ...

    def make_host_frame(self, num_bytes: int) -> Tensor:
        """Returns host memory that the device copies from and to by itself."""
        ...

    def make_nccl_id(self) -> bytes:
        """Returns a name for a new communicator.

        Raises:
            DeviceFault: there is no NCCL.
        """
        ...

    def join_nccl(
        self, nccl_id: bytes, member: int, timeout_s: float, is_given_up: Callable[[], bool]
    ) -> NcclEnd:
        """Meets the other member, 0 or 1.

        Raises:
            DeviceFault: it did not come in time.
        """
        ...

    def make_lane(self) -> Lane:
        """Returns a new lane."""
        ...

    def scatter(self, region: KvRegion, payload: Tensor) -> Mark:
        """Writes a frame to the rank's blocks; later steps of the engine see it.

        Engine thread only.

        Raises:
            ValueError: the frame does not fit the region.
        """
        ...

    def let_steps_wait_for(self, mark: Mark) -> None:
        """Lets later steps of the engine begin after a mark. Engine thread only."""
        ...
