"""Which frames links are busy with."""

from pdserve.request import ReservationId
from pdserve.timeline import Clock


class Shipments:
    """Frames that were given to a link and are not through. Engine thread only."""

    def __init__(self, clock: Clock) -> None:
        """Starts without frames."""
        self._clock = clock
        self._frames: dict[ReservationId, set[int]] = {}
        self._latest_s = 0.0

    @property
    def since_s(self) -> float | None:
        """When the latest of them was given to its link; None when there are none."""
        return self._latest_s if self._frames else None

    def add(self, reservation_id: ReservationId, frame_index: int) -> None:
        """Notes a frame that is given to a link now."""
        self._frames.setdefault(reservation_id, set()).add(frame_index)
        self._latest_s = self._clock.now()

    def sent(self, reservation_id: ReservationId, frame_index: int) -> None:
        """Notes that a frame is through; one that is not known any more changes nothing."""
        frames = self._frames.get(reservation_id)
        if frames is not None:
            frames.discard(frame_index)
            if not frames:
                del self._frames[reservation_id]

    def drop(self, reservation_id: ReservationId) -> None:
        """Forgets a reservation's frames: they are lost, or nobody wants them."""
        self._frames.pop(reservation_id, None)
