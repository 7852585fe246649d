"""Small rows that travel between host and device with each frame, in memory made once.

A frame costs the host as many calls as it makes, each of which may have to wait for the
interpreter's lock while the engine works: so nothing is allocated, zeroed or sliced per frame.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

NUM_ROWS = 64
MAX_ROW_WORDS = 1024
SUM_WORDS = 2
_MASK = 0xFFFFFFFF


class Waitable(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Waits until the work before it is done."""
        ...


class UploadRows:
    """Lists of block ids on their way to the device, one row each, used in turn."""

    def __init__(self, device: torch.device) -> None:
        """Allocates on both sides."""
        is_pinned = device.type != "cpu"
        host = torch.zeros(NUM_ROWS, MAX_ROW_WORDS, dtype=torch.int64, pin_memory=is_pinned)
        self._device = device
        self._host = host.numpy()
        self._sources = host.unbind(0)
        self._targets = torch.empty_like(host, device=device, pin_memory=False).unbind(0)
        self._marks: list[Waitable | None] = [None] * NUM_ROWS
        self._next = 0

    def upload(self, block_ids: Sequence[int]) -> Tensor:
        """Launches the copy of some ids, on the current stream; they lie at the row's start."""
        count = len(block_ids)
        if count > MAX_ROW_WORDS:
            return torch.tensor(block_ids, dtype=torch.int64).to(self._device)
        row = self._next
        before = self._marks[row]
        if before is not None:
            # Long past, unless more frames are under way than there are rows.
            before.wait()
        self._host[row, :count] = block_ids
        self._targets[row].copy_(self._sources[row], non_blocking=True)
        return self._targets[row]

    def note_used(self, mark: Waitable) -> None:
        """Notes until when the last row is needed; the next one comes next."""
        self._marks[self._next] = mark
        self._next = (self._next + 1) % NUM_ROWS


class SumRows:
    """Sums of frames on their way to the host.

    The device only adds to two cells, in the order of one stream; a frame's own sums are the
    difference of two readings. Readings are kept for `NUM_ROWS` frames.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocates on both sides, all zero."""
        is_pinned = device.type != "cpu"
        host = torch.zeros(NUM_ROWS, SUM_WORDS, dtype=torch.int64, pin_memory=is_pinned)
        self.cells = torch.zeros(SUM_WORDS, dtype=torch.int64, device=device)
        """What kernels add to."""
        self._host = host.numpy()
        self._targets = host.unbind(0)
        self._next = 0

    def read(self) -> "FrameSums":
        """Launches a reading, on the current stream, behind what added to the cells."""
        row = self._next
        self._targets[row].copy_(self.cells, non_blocking=True)
        self._next = (row + 1) % NUM_ROWS
        return FrameSums(self, row)

    def difference(self, row: int) -> tuple[int, int]:
        """Returns what was added between a reading and the one before it."""
        now, before = self._host[row], self._host[row - 1]
        plain, weighted = (int(one) - int(other) for one, other in zip(now, before, strict=True))
        return plain & _MASK, weighted & _MASK


class FrameSums:
    """The checksum of one frame."""

    def __init__(self, rows: SumRows, row: int) -> None:
        """Remembers the reading."""
        self._rows = rows
        self._row = row

    def value(self) -> int:
        """Returns 64 bits, once a mark behind it is reached."""
        plain, weighted = self._rows.difference(self._row)
        return weighted << 32 | plain
