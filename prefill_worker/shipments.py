"""Which frames links are busy with."""

from collections import deque

from pdserve.request import ReservationId
from pdserve.timeline import Clock

_Key = tuple[ReservationId, int]


class Shipments:
    """Frames that were given to a link and are not through. Engine thread only.

    Those of a step in flight count from its end on: until then their link has nothing to read.
    """

    def __init__(self, clock: Clock) -> None:
        """Starts without frames."""
        self._clock = clock
        self._frames: set[_Key] = set()
        self._steps: deque[tuple[int, set[_Key]]] = deque()
        """Numbers of the steps in flight, and frames that wait for them."""
        self._latest_s = 0.0

    @property
    def since_s(self) -> float | None:
        """When the latest of them was there to be sent; None when there are none."""
        return self._latest_s if self._frames else None

    def begin_step(self, step: int) -> None:
        """Notes a step that is in flight now."""
        self._steps.append((step, set()))

    def end_step(self) -> None:
        """Notes that the oldest step in flight has ended, if steps are told of."""
        _, frames = self._steps.popleft() if self._steps else (0, set())
        if frames:
            self._frames |= frames
            self._latest_s = self._clock.now()

    def add(
        self, reservation_id: ReservationId, frame_index: int, after_step: int | None = None
    ) -> None:
        """Notes a frame that is given to a link now, of a step in flight or of one that ended."""
        key = (reservation_id, frame_index)
        for step, frames in self._steps:
            if step == after_step:
                frames.add(key)
                return
        self._frames.add(key)
        self._latest_s = self._clock.now()

    def sent(self, reservation_id: ReservationId, frame_index: int) -> None:
        """Notes that a frame is through; one that is not known any more changes nothing."""
        for frames in self._all():
            frames.discard((reservation_id, frame_index))

    def drop(self, reservation_id: ReservationId) -> None:
        """Forgets a reservation's frames: they are lost, or nobody wants them."""
        for frames in self._all():
            frames.difference_update([key for key in frames if key[0] == reservation_id])

    def _all(self) -> tuple[set[_Key], ...]:
        return (self._frames, *(frames for _, frames in self._steps))
