"""Small rows that travel between host and device with each frame, in memory made once.

A frame costs the host as many calls as it makes, each of which may have to wait for the
interpreter's lock while the engine works: so nothing is allocated, zeroed or sliced per frame.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.cuda.runtime import upload
from pdserve.kernels.kv_pack import SUM_WORDS

NUM_ROWS = 64
MAX_ROW_WORDS = 1024
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
        self._large: dict[int, Tensor] = {}
        """Lists that fit no row, kept as long as the row that they came in place of."""
        self._next = 0

    def upload(self, block_ids: Sequence[int], stream: int) -> Tensor:
        """Launches the copy of some ids, on a stream by its handle; they lie at the row's start."""
        count, row = len(block_ids), self._next
        before = self._marks[row]
        if before is not None:
            # Long past, unless more frames are under way than there are rows.
            before.wait()
        if count > MAX_ROW_WORDS:
            self._large[row] = large = torch.tensor(block_ids, dtype=torch.int64).to(self._device)
            # It was copied on torch's stream.
            if self._device.type != "cpu":
                torch.cuda.current_stream(self._device).synchronize()
            return large
        self._host[row, :count] = block_ids
        upload(self._targets[row], self._sources[row], 8 * count, stream)
        return self._targets[row]

    def note_used(self, mark: Waitable) -> None:
        """Notes until when the last row is needed; the next one comes next."""
        self._marks[self._next] = mark
        self._next = (self._next + 1) % NUM_ROWS


class SumRows:
    """Where kernels write the sums of frames: memory of the host, one row each, used in turn.

    A row is kept for `NUM_ROWS` frames.
    """

    def __init__(self, device: torch.device, num_programs: int) -> None:
        """Allocates it, for so many programs a frame at most."""
        is_pinned = device.type != "cpu"
        shape = (NUM_ROWS, num_programs, SUM_WORDS)
        host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_pinned)
        self._host = host.numpy()
        self._rows = host.unbind(0)
        self._next = self._taken = 0

    def take(self) -> Tensor:
        """Returns the next row, for one frame."""
        row, self._next = self._next, (self._next + 1) % NUM_ROWS
        self._taken = row
        return self._rows[row]

    def sums(self, num_programs: int) -> "FrameSums":
        """Returns the checksum that so many programs write to the row that was taken last."""
        return FrameSums(self._host[self._taken, :num_programs])


class FrameSums:
    """The checksum of one frame."""

    def __init__(self, shares: NDArray[np.int64]) -> None:
        """Keeps where the device writes it."""
        self._shares = shares

    def value(self) -> int:
        """Returns 64 bits, once a mark behind it is reached."""
        plain, weighted = (int(one) & _MASK for one in self._shares.sum(axis=0))
        return weighted << 32 | plain
