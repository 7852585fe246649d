"""The one crossing into the engine thread: a queue that any thread may post to."""

import queue
import threading
from collections.abc import Callable

from pdserve.rank.meeting import KeyBook
from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import rank_pb2


class ChannelLost:
    """The face is gone: the rank must end."""


class Inbox:
    """Events for the engine thread, in the order they were posted."""

    def __init__(self, on_post: Callable[[object], None] | None = None) -> None:
        """Is empty; `on_post` sees each event as it is posted, on the thread that posts it."""
        self._on_post = on_post
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def post(self, event: object) -> None:
        """Adds an event; callable from any thread, never waits."""
        if self._on_post is not None:
            self._on_post(event)
        self._queue.put(event)

    def drain(self, timeout_s: float) -> list[object]:
        """Returns all events, waiting up to `timeout_s` for a first one. Engine thread only."""
        events: list[object] = []
        try:
            events.append(
                self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get(False)
            )
            while True:
                events.append(self._queue.get(False))
        except queue.Empty:
            return events


def read_channel(
    channel: BlockingChannel, inbox: Inbox, keys: KeyBook, *, has_calls: bool
) -> threading.Thread:
    """Starts the thread that takes what the face says: keys to their book, all else to the inbox.

    Args:
        channel: to the face.
        inbox: of the engine thread.
        keys: of other ranks.
        has_calls: False where rank 0 gives the orders; of the face only its end counts there.
    """

    def read() -> None:
        try:
            while True:
                message = rank_pb2.ToRank.FromString(channel.receive())
                if message.HasField("key"):
                    keys.put(message.key.key, message.key.value)
                elif has_calls:
                    inbox.post(message)
        except ChannelClosed:
            inbox.post(ChannelLost())

    thread = threading.Thread(target=read, name="face-reader", daemon=True)
    thread.start()
    return thread
