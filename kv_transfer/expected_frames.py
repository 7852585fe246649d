"""Where frames that land may be written at once, by the link's own thread.

The engine says so when it grants a reservation, and takes it back before it gives the blocks away.
What nobody expects waits in its slot for the engine's word.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kv_transfer.events import LinkId
from kv_transfer.link_device import Mark
from pdserve.cache.kv_region import KvRegion
from pdserve.request import Incarnation, ReservationId

POLL_S = 20e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFrame:
    """A frame that is to come, once."""

    num_bytes: int
    prefill_rank: int
    region: KvRegion


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFrames:
    """All frames of a reservation that one rank is to get."""

    reservation_id: ReservationId
    peer: Incarnation
    """Of the prefill worker."""
    frames: Mapping[int, ExpectedFrame]
    """By their index."""


@dataclass(slots=True)
class _Expected:
    peer: Incarnation
    frames: dict[int, ExpectedFrame]
    marks: list[Mark] = field(default_factory=list)
    """Behind everything that is being written."""


class ExpectationBook:
    """What one rank's links may write. Any thread may call."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a write may take."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._expected: dict[ReservationId, _Expected] = {}

    def expect(self, expected: ExpectedFrames) -> None:
        """Lets frames of a reservation be written."""
        with self._lock:
            assert expected.reservation_id not in self._expected
            one = _Expected(expected.peer, dict(expected.frames))
            self._expected[expected.reservation_id] = one

    def place(
        self,
        link: LinkId,
        reservation_id: ReservationId,
        frame_index: int,
        num_bytes: int,
        launch: Callable[[KvRegion], Mark],
    ) -> bool:
        """Launches the writing of a frame, if it is expected as it is; says whether it was.

        Args:
            link: over which it came.
            reservation_id: as announced.
            frame_index: as announced.
            num_bytes: as announced.
            launch: writes it to a region.
        """
        # Held while it is launched: nobody may withdraw between the question and the launch.
        with self._lock:
            one = self._expected.get(reservation_id)
            frame = None if one is None else one.frames.get(frame_index)
            if one is None or frame is None:
                return False
            is_as_said = frame.num_bytes == num_bytes and frame.prefill_rank == link.peer_rank
            if one.peer != link.peer or not is_as_said:
                return False
            del one.frames[frame_index]
            one.marks = [mark for mark in one.marks if not mark.is_reached()]
            one.marks.append(launch(frame.region))
            return True

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Forgets a reservation; when this returns, nothing writes its blocks any more.

        Raises:
            TimeoutError: the device does not end.
            DeviceFault: it failed.
        """
        with self._lock:
            one = self._expected.pop(reservation_id, None)
        deadline_s = time.monotonic() + self._timeout_s
        while one is not None and not all(mark.is_reached() for mark in one.marks):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a frame was not written within {self._timeout_s} s")
            time.sleep(POLL_S)
