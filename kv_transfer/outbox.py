"""Frames that wait for room on their link, before they are packed."""

from collections import deque
from collections.abc import Callable

from kv_transfer.events import LinkEnds
from kv_transfer.prefill_actions import PushFrame
from pdserve.request import ReservationId


class FrameOutbox:
    """Keeps `PushFrame` actions in order, apart for each link: a slow one delays no other.

    Packing is left to the last moment, so that only what is about to be sent takes memory.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._queues: dict[LinkEnds, deque[PushFrame]] = {}

    def __len__(self) -> int:
        """Returns the number of frames that wait."""
        return sum(len(queue) for queue in self._queues.values())

    def add(self, action: PushFrame) -> None:
        """Appends a frame."""
        self._queues.setdefault(_ends_of(action), deque()).append(action)

    def drop(self, reservation_id: ReservationId) -> None:
        """Forgets the frames of a reservation; call it before their blocks are released."""
        for ends, queue in list(self._queues.items()):
            kept = deque(action for action in queue if action.reservation_id != reservation_id)
            self._replace(ends, kept)

    def take(self, has_room: Callable[[LinkEnds], bool]) -> PushFrame | None:
        """Returns a frame whose link has room, links in turn; None when there is none."""
        for ends in list(self._queues):
            if has_room(ends):
                queue = self._queues.pop(ends)
                action = queue.popleft()
                self._replace(ends, queue)  # behind the other links
                return action
        return None

    def _replace(self, ends: LinkEnds, queue: deque[PushFrame]) -> None:
        if queue:
            self._queues[ends] = queue
        else:
            self._queues.pop(ends, None)


def _ends_of(action: PushFrame) -> LinkEnds:
    frame = action.frame
    return LinkEnds(action.target.incarnation, frame.decode_rank, frame.prefill_rank)
