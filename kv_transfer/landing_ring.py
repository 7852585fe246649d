"""The landing slots of one link, and who has each.

    free -> taken (the peer may write it) -> landed (the engine reads it) -> draining -> free

A slot drains while the GPU still reads it; on the CPU it is free at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from kv_transfer.link_device import Mark

DRAIN_POLL_S = 200e-6


class LandingRing:
    """Slots of one size, in memory that its maker owns. Any thread may call."""

    def __init__(self, memory: Tensor, num_slots: int, wake: Callable[[], None]) -> None:
        """Starts with all slots free.

        Args:
            memory: uint8, of `num_slots` slots.
            num_slots: of one size.
            wake: called when a slot was released.
        """
        self._slots = memory.view(num_slots, -1).unbind(0)
        self._wake = wake
        self._free = deque(range(num_slots))
        self._landed: set[int] = set()
        self._draining: list[tuple[int, Mark]] = []
        self._condition = threading.Condition()

    @property
    def slot_bytes(self) -> int:
        """Size of the largest frame."""
        return self._slots[0].numel()

    @property
    def is_quiet(self) -> bool:
        """True when the engine holds no slot and nothing reads one."""
        with self._condition:
            return not self._landed and not self._draining

    @property
    def is_draining(self) -> bool:
        """True when a released slot is still being read."""
        return bool(self._draining)

    @property
    def has_free(self) -> bool:
        """True when a slot is free."""
        return bool(self._free)

    @property
    def num_landed(self) -> int:
        """Slots that the engine holds."""
        with self._condition:
            return len(self._landed)

    def slot(self, number: int, num_bytes: int) -> Tensor:
        """Returns the first bytes of a slot."""
        slot = self._slots[number]
        return slot if num_bytes == slot.numel() else slot[:num_bytes]

    def take(self) -> int | None:
        """Takes a free slot for the peer to write; None when there is none."""
        with self._condition:
            self._drain()
            return self._free.popleft() if self._free else None

    def wait_and_take(self, timeout_s: float, is_over: Callable[[], bool]) -> int | None:
        """Takes a free slot; None when none was released in time, or it is over meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while not is_over():
                self._drain()
                if self._free:
                    return self._free.popleft()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._condition.wait(min(left_s, DRAIN_POLL_S) if self._draining else left_s)
        return None

    def land(self, number: int) -> None:
        """Gives a written slot to the engine."""
        with self._condition:
            self._landed.add(number)

    def give_back(self, number: int) -> None:
        """Frees a written slot that the engine need not see."""
        with self._condition:
            self._free.append(number)

    def payload(self, number: int, num_bytes: int) -> Tensor:
        """Returns a landed frame's bytes, valid until its slot is released."""
        assert number in self._landed
        return self.slot(number, num_bytes)

    def release(self, number: int, after: Mark | None) -> None:
        """Takes a slot back from the engine; `after`: the work that still reads it."""
        with self._condition:
            self._landed.remove(number)
            if after is None:
                self._free.append(number)
            else:
                self._draining.append((number, after))
            self._condition.notify_all()
        self._wake()

    def reclaim(self) -> int:
        """Frees the slots that nothing reads any more; returns how many.

        Raises:
            DeviceFault: the work that read one failed.
        """
        with self._condition:
            return self._drain()

    def notify(self) -> None:
        """Wakes `wait_and_take`, which asks again whether it is over."""
        with self._condition:
            self._condition.notify_all()

    def _drain(self) -> int:
        done = [number for number, mark in self._draining if mark.is_reached()]
        self._draining = [one for one in self._draining if one[0] not in done]
        self._free.extend(done)
        return len(done)
