"""Frames that wait for room on their link, before they are packed."""

from collections import deque
from collections.abc import Callable

from kv_transfer.events import LinkEnds
from kv_transfer.prefill_actions import PushFrame
from pdserve.request import ReservationId


class FrameOutbox:
    """Keeps `PushFrame` actions in order, apart for each link: a slow one delays no other.

    Frames of a step in flight go in the order in which it computes them: the first layers of all
    its prompts, then the next ones. A link sends what it was given in that order.

    Packing is left to the last moment, so that only what is about to be sent takes memory.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._queues: dict[LinkEnds, deque[PushFrame]] = {}

    def __len__(self) -> int:
        """Returns the number of frames that wait."""
        return sum(len(queue) for queue in self._queues.values())

    def add(self, action: PushFrame) -> None:
        """Adds a frame behind those that are there no later."""
        queue = self._queues.setdefault(_ends_of(action), deque())
        place = len(queue)
        while place and _turn_of(queue[place - 1]) > _turn_of(action):
            place -= 1
        queue.insert(place, action)

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


def _turn_of(action: PushFrame) -> tuple[int, int]:
    """Orders frames by when they are computed; those that are there come first."""
    return (0, 0) if action.after_step is None else (action.after_step, action.frame.first_layer)


def _ends_of(action: PushFrame) -> LinkEnds:
    frame = action.frame
    return LinkEnds(action.target.incarnation, frame.decode_rank, frame.prefill_rank)
