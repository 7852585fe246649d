"""Faults injected into frames on purpose."""

import threading

from torch import Tensor

from pdserve.config.worker import FaultConfig


class FrameFaults:
    """Counts the frames that a worker sends, from 1, and spoils the chosen one. Thread-safe."""

    def __init__(self, config: FaultConfig) -> None:
        """Takes the worker's fault settings."""
        self.delay_s = config.frame_delay_s
        self._corrupt = config.corrupt_frame
        self._corrupt_silently = config.corrupt_frame_silently
        self._lock = threading.Lock()
        self._num_frames = 0

    def count(self) -> int:
        """Returns the number of the next frame."""
        with self._lock:
            self._num_frames += 1
            return self._num_frames

    def spoils_silently(self, number: int) -> bool:
        """Says whether `spoil_before_checksum` changes this frame."""
        return number == self._corrupt_silently

    def spoils_visibly(self, number: int) -> bool:
        """Says whether `spoil_after_checksum` changes this frame."""
        return number == self._corrupt

    def spoil_before_checksum(self, number: int, payload: Tensor) -> None:
        """Flips the sign of every value, which no checksum will show but the output must.

        Every second byte's highest bit: the sign of bfloat16, and of float32 (with a mantissa bit).
        """
        if number == self._corrupt_silently:
            payload[1::2] ^= 0x80

    def spoil_after_checksum(self, number: int, payload: Tensor) -> None:
        """Flips a bit that the checksum shows."""
        if number == self._corrupt:
            payload[payload.numel() // 2] ^= 1
