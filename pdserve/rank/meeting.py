"""Where the ranks of a replica find each other before they talk directly: a store of a few keys.

On one machine it is a file in a folder that only this user can read. Between nodes each rank keeps
a store of its own, and every key that one of them writes is relayed to all others over the channels
to their face: no server, no port, nobody else who could write.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import DistStoreError

CONNECT_TIMEOUT_S = 60.0


class Meeting(Protocol):
    """Makes stores, each for some ranks of one replica; they share it by its name."""

    def store(self, name: str, num_ranks: int) -> Store:
        """Returns a store in which `num_ranks` ranks see each other's keys.

        It must live as long as what is connected through it; on one machine it cannot be used any
        more once all ranks have said that they are ready.
        """
        ...


class FolderMeeting:
    """Ranks of one machine."""

    def __init__(self, folder: Path) -> None:
        """Takes a folder that all of them see and nobody else does."""
        self._folder = folder

    def store(self, name: str, num_ranks: int) -> Store:
        """Returns a store in a file; see `Meeting`."""
        store = FileStore(str(self._folder / name), num_ranks)
        store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        return store


class KeyBook:
    """What is known of the keys of all ranks. Any thread may call."""

    def __init__(self) -> None:
        """Starts empty."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Notes a key, of this rank or of another."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Waits until all keys are known; False when they are not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has(keys), timeout_s)

    def has(self, keys: Sequence[str]) -> bool:
        """Says whether all keys are known."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """Returns a known key's value."""
        return self._values[key]


class RelayedMeeting:
    """Ranks of several nodes, or some of them."""

    def __init__(self, book: KeyBook, tell: Callable[[str, bytes], None]) -> None:
        """Begins.

        Args:
            book: takes the keys of other ranks from whoever reads the channel.
            tell: sends a key of this rank to all others; called from any thread.
        """
        self._store = _RelayedStore(book, tell)

    def store(self, name: str, num_ranks: int) -> Store:
        """Returns a part of the one store; see `Meeting`."""
        store = PrefixStore(name, self._store)
        store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        return store


class _RelayedStore(Store):
    """A store in Python that torch's groups call from C++.

    They set keys of their own and wait for those of others. What would need one owner of all keys
    (counters, compare-and-set) is refused by the base class.
    """

    def __init__(self, book: KeyBook, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._book = book
        self._tell = tell
        self._timeout_s = CONNECT_TIMEOUT_S

    # The names of parameters are the base class's.
    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._book.put(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._book.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if not self._book.wait(keys, timeout_s):
            raise DistStoreError(f"no word of {', '.join(keys)} within {timeout_s:g} s")

    def check(self, keys: list[str]) -> bool:
        return self._book.has(keys)
