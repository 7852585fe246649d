"""All reservations of a decode worker, by their own ids and by the hand-offs they are for."""

from kv_transfer.reservation import Reservation
from pdserve.request import HandoffId, ReservationId


class ReservationBook:
    """Holds what holds blocks: at most one reservation a hand-off, those being aborted included."""

    def __init__(self) -> None:
        """Starts empty."""
        self._entries: dict[ReservationId, Reservation] = {}
        self._by_handoff: dict[HandoffId, Reservation] = {}

    def __len__(self) -> int:
        """Returns how many there are."""
        return len(self._entries)

    @property
    def num_receiving(self) -> int:
        """Reservations of which some frames have come."""
        return sum(bool(entry.landed) for entry in self._entries.values())

    def all(self) -> tuple[Reservation, ...]:
        """Returns them, oldest first; the book may change meanwhile."""
        return tuple(self._entries.values())

    def get(self, reservation_id: ReservationId) -> Reservation | None:
        """Finds one by its id."""
        return self._entries.get(reservation_id)

    def find(self, handoff_id: HandoffId) -> Reservation | None:
        """Finds the one of a hand-off."""
        return self._by_handoff.get(handoff_id)

    def add(self, entry: Reservation) -> None:
        """Takes one in."""
        assert entry.envelope.handoff_id not in self._by_handoff
        self._entries[entry.reservation_id] = entry
        self._by_handoff[entry.envelope.handoff_id] = entry

    def remove(self, entry: Reservation) -> None:
        """Forgets one, whose blocks are somebody else's from now on."""
        del self._entries[entry.reservation_id]
        del self._by_handoff[entry.envelope.handoff_id]
