"""One end of the conversation between a front and its brain: words in order, sent in batches."""

import asyncio
from collections import deque
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.v1 import brain_pb2

MAX_WAITING = 1 << 16
"""Words that the other end has not taken; past it the conversation is over."""


class Talk:
    """Owns a connected channel. One event loop."""

    def __init__(self, channel: AsyncChannel) -> None:
        """Says nothing before `write` runs."""
        self._channel = channel
        self._waiting: deque[brain_pb2.Word] = deque()
        self._news = asyncio.Event()
        self._is_over = False

    def say(self, word: brain_pb2.Word) -> None:
        """Queues a word; it is lost when the conversation is over, as all after it."""
        if self._is_over:
            return
        self._waiting.append(word)
        self._news.set()
        if len(self._waiting) > MAX_WAITING:
            self.hang_up()

    async def write(self) -> None:
        """Sends what is said, until cancelled or until the other end is gone."""
        while True:
            await self._news.wait()
            self._news.clear()
            words = list(self._waiting)
            self._waiting.clear()
            try:
                await self._channel.send(brain_pb2.Words(words=words).SerializeToString())
            except ChannelClosed:
                # Whoever listens finds out.
                self.hang_up()
                return

    async def listen(self) -> Sequence[brain_pb2.Word]:
        """Waits for what the other end says next.

        Raises:
            ChannelClosed: it is gone, or does not keep to the protocol.
        """
        message = await self._channel.receive()
        try:
            return brain_pb2.Words.FromString(message).words
        except DecodeError as error:
            raise ChannelClosed("not a message of this protocol") from error

    def close(self) -> None:
        """Frees the channel; nobody listens or writes any more."""
        self._is_over = True
        self._channel.shut()
        self._channel.close()

    def hang_up(self) -> None:
        """Ends it: whoever listens, at either end, finds out."""
        self._is_over = True
        self._waiting.clear()
        self._channel.shut()
