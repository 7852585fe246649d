"""Where the ranks of a replica tell each other what they found while they load.

In a folder that only this user can read: no server, no port.
"""

from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import FileStore, Store

TIMEOUT_S = 600.0
"""Longer than loading takes on the slowest rank: the face sees a dead one sooner."""


class Meeting(Protocol):
    """All ranks of a replica. Every call is made by all of them, with topics of their own."""

    @property
    def rank(self) -> int:
        """This rank's place."""
        ...

    def exchange(self, topic: str, data: bytes) -> tuple[bytes, ...]:
        """Returns what each rank has to say about a topic, once all of them have."""
        ...


class StoreMeeting:
    """A `Meeting` over a key-value store of torch's."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Keeps the store, which all ranks share."""
        self.rank = rank
        self._store = store
        self._size = size
        store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def exchange(self, topic: str, data: bytes) -> tuple[bytes, ...]:
        """Waits for all ranks.

        Raises:
            RuntimeError: one of them did not come in time.
        """
        # Hexadecimal: the store hands out text.
        self._store.set(f"{topic}/{self.rank}", data.hex())
        told = (self._store.get(f"{topic}/{rank}") for rank in range(self._size))
        return tuple(bytes.fromhex(one.decode()) for one in told)


def meet_in_folder(folder: Path, rank: int, size: int) -> StoreMeeting:
    """Returns the meeting of the ranks that share a folder."""
    return StoreMeeting(FileStore(str(folder / "meeting"), size), rank, size)


def agree_on_least(meeting: Meeting | None, topic: str, count: int) -> int:
    """Returns the smallest of all ranks' counts; an only rank's is its own."""
    if meeting is None:
        return count
    return min(int(told) for told in meeting.exchange(topic, str(count).encode()))
