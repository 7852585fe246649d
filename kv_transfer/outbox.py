"""Frames that wait for room on their link, before they are packed."""

from collections import deque
from collections.abc import Callable

from kv_transfer.prefill_actions import PushFrame
from pdserve.request import Incarnation, ReservationId


class FrameOutbox:
    """Keeps `PushFrame` actions in order, apart for each peer: a slow peer delays no other.

    Packing is left to the last moment, so that only what is about to be sent takes memory.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._queues: dict[Incarnation, deque[PushFrame]] = {}

    def __len__(self) -> int:
        """Returns the number of frames that wait."""
        return sum(len(queue) for queue in self._queues.values())

    def add(self, action: PushFrame) -> None:
        """Appends a frame."""
        self._queues.setdefault(action.target.incarnation, deque()).append(action)

    def drop(self, reservation_id: ReservationId) -> None:
        """Forgets the frames of a reservation; call it before their blocks are released."""
        for peer, queue in list(self._queues.items()):
            kept = deque(action for action in queue if action.reservation_id != reservation_id)
            self._replace(peer, kept)

    def take(self, has_room: Callable[[Incarnation], bool]) -> PushFrame | None:
        """Returns a frame whose link has room, peers in turn; None when there is none."""
        for peer in list(self._queues):
            if has_room(peer):
                queue = self._queues.pop(peer)
                action = queue.popleft()
                self._replace(peer, queue)  # behind the other peers
                return action
        return None

    def _replace(self, peer: Incarnation, queue: deque[PushFrame]) -> None:
        if queue:
            self._queues[peer] = queue
        else:
            self._queues.pop(peer, None)
