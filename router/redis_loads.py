"""The channel between fronts, by Redis' publish and subscribe: nothing is left behind there."""

from collections.abc import AsyncIterator
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.load_share import ChannelDown


class RedisLoadChannel:
    """A `LoadChannel` over one Redis."""

    def __init__(self, url: str, cluster: str, timeout_s: float = 2.0) -> None:
        """Prepares a client; nothing is connected before the first call."""
        self._name = f"pdserve:{cluster}:loads"
        self._client: Redis = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
        self._poll_s = timeout_s / 2

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def publish(self, text: str) -> None:
        """Sends to all; see `LoadChannel`."""
        try:
            await self._client.publish(self._name, text)
        except (RedisError, OSError) as error:
            raise ChannelDown(str(error)) from error

    async def listen(self) -> AsyncIterator[str]:
        """Yields what all send; see `LoadChannel`."""
        try:
            async with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
                await subscription.subscribe(self._name)
                while True:
                    message = await subscription.get_message(timeout=self._poll_s)
                    if message is not None and message["type"] == "message":
                        yield str(message["data"])
        except (RedisError, OSError) as error:
            raise ChannelDown(str(error)) from error
