"""The frames of one link that wait, or are under way, and the end of it all."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.link_device import Mark
from kv_transfer.protocol import SampledAhead
from kv_transfer.transport import OutgoingFrame
from pdserve.request import ReservationId


@dataclass(slots=True)
class _UnderWay:
    frame: OutgoingFrame
    is_launching: bool
    """Its blocks are about to be read; from where on `read` tells of it."""
    read: Mark | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEnd:
    """Why a link ended."""

    detail: str
    is_orderly: bool


class FrameQueue:
    """Any thread may call; `take` and what follows it belong to the link's thread."""

    def __init__(self, max_waiting: int, wake: Callable[[], None]) -> None:
        """Starts empty.

        Args:
            max_waiting: frames; one more has no room.
            wake: called when it ends.
        """
        self._max_waiting = max_waiting
        self._wake = wake
        self._waiting: deque[OutgoingFrame] = deque()
        self._under_way: list[_UnderWay] = []
        self._words: deque[SampledAhead] = deque()
        self._condition = threading.Condition()
        self._end: LinkEnd | None = None

    @property
    def end(self) -> LinkEnd | None:
        """Why it takes no more frames; None while it does."""
        with self._condition:
            return self._end

    @property
    def is_idle(self) -> bool:
        """True when no frame waits or is under way."""
        with self._condition:
            return not self._waiting and not self._under_way

    @property
    def has_waiting(self) -> bool:
        """True when a frame waits."""
        with self._condition:
            return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """True when one more frame may wait."""
        with self._condition:
            return len(self._waiting) < self._max_waiting

    def __len__(self) -> int:
        """Counts the frames that wait or are under way."""
        with self._condition:
            return len(self._waiting) + len(self._under_way)

    def push(self, frame: OutgoingFrame) -> bool:
        """Adds a frame; False when the link has ended meanwhile."""
        with self._condition:
            if self._end is not None:
                return False
            self._waiting.append(frame)
            self._condition.notify_all()
        return True

    def tell(self, words: SampledAhead) -> None:
        """Adds words for the peer; they wait for no frame."""
        self._words.append(words)

    @property
    def next_words(self) -> SampledAhead | None:
        """The next words; None: there are none. Asked in each turn of the link's thread."""
        return self._words[0] if self._words else None

    def drop_words(self) -> None:
        """Forgets the next words: they were sent."""
        self._words.popleft()

    def cancel(self, reservation_id: ReservationId) -> tuple[Mark, ...]:
        """Drops waiting frames of a reservation; one under way is sent to its end.

        Returns:
            What to wait for until nothing reads the reservation's blocks any more.
        """
        with self._condition:
            self._waiting = deque(
                frame for frame in self._waiting if frame.reservation_id != reservation_id
            )
            mine = [one for one in self._under_way if one.frame.reservation_id == reservation_id]
            self._condition.wait_for(lambda: not any(one.is_launching for one in mine))
            return tuple(one.read for one in mine if one.read is not None)

    def take(self, *, is_waiting: bool, is_computed: bool = False) -> OutgoingFrame | None:
        """Takes the next frame; None: there is none, or the link has ended.

        A frame that is still in blocks must be told of by `note_read` at once.

        Args:
            is_waiting: wait for one.
            is_computed: take none whose step is not there yet.
        """
        with self._condition:
            if is_waiting:
                self._condition.wait_for(lambda: self._waiting or self._end is not None)
            if self._end is not None or not self._waiting:
                return None
            after = self._waiting[0].after
            if is_computed and after is not None and not after.is_reached():
                return None
            frame = self._waiting.popleft()
            self._under_way.append(_UnderWay(frame, is_launching=frame.is_in_blocks))
            return frame

    def pause(self, seconds: float) -> None:
        """Waits, until the link ends at most."""
        with self._condition:
            self._condition.wait_for(lambda: self._end is not None, seconds)

    def note_read(self, frame: OutgoingFrame, mark: Mark | None) -> None:
        """Notes that its blocks were read by `mark`; None: nothing was launched."""
        with self._condition:
            for one in self._under_way:
                if one.frame is frame:
                    one.is_launching, one.read = False, mark
            self._condition.notify_all()

    def finish(self, frame: OutgoingFrame) -> bool:
        """Notes that a frame was sent; False when it was reported as lost already."""
        with self._condition:
            if self._end is not None:
                return False
            self._under_way = [one for one in self._under_way if one.frame is not frame]
            return True

    def close(self, end: LinkEnd) -> frozenset[ReservationId] | None:
        """Ends it for good, the first reason stands.

        Returns:
            The reservations with frames that were not sent; None when it had ended before.
        """
        with self._condition:
            if self._end is not None:
                return None
            self._end = end
            frames = (*self._waiting, *(one.frame for one in self._under_way))
            self._waiting.clear()
            self._condition.notify_all()
        self._wake()
        return frozenset(frame.reservation_id for frame in frames)
