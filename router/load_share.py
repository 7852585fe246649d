"""What fronts tell each other of the work they have sent: often, small, and soon forgotten.

A front says every 100 ms what it has at each worker, if that has changed; who says nothing for half
a second has nothing, as far as others know. Without the channel, workers' own reports are all that
a front knows of others.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np

from pdserve.request import FrontId, WorkerId
from pdserve.timeline import Clock
from router.fleet import NUM_TERMS, Fleet

logger = logging.getLogger(__name__)

PUBLISH_S = 0.1
REPEAT_S = 0.2
"""What has not changed is repeated before it expires."""
EXPIRE_S = 0.5
_RECONNECT_S = 1.0


class LoadChannel(Protocol):
    """Carries short texts between all fronts of a cluster; may lose some."""

    async def publish(self, text: str) -> None:
        """Sends to all.

        Raises:
            ChannelDown: it is not there now.
        """
        ...

    def listen(self) -> AsyncIterator[str]:
        """Yields what all send, oneself included, until it breaks.

        Raises:
            ChannelDown: it is not there now.
        """
        ...


class ChannelDown(Exception):
    """The channel is away; fronts go on without it."""


class LoadShare:
    """One front's part. One event loop."""

    def __init__(self, front_id: FrontId, fleet: Fleet, channel: LoadChannel, clock: Clock) -> None:
        """Says nothing before `run`."""
        self._front_id = front_id
        self._fleet = fleet
        self._channel = channel
        self._clock = clock
        self._said: dict[str, tuple[float, dict[str, list[float]]]] = {}
        """By front: when, and what."""
        self._last_text = ""
        self._last_said_s = float("-inf")
        self._has_shared = False

    async def run(self) -> None:
        """Tells and listens until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            while True:
                await self.tell()
                self.refresh()
                await asyncio.sleep(PUBLISH_S)

    async def tell(self) -> None:
        """Says what this front has sent, if it is news or about to expire."""
        now_s, text = self._clock.now(), self.describe()
        is_due = bool(text) and now_s - self._last_said_s >= REPEAT_S
        if text == self._last_text and not is_due:
            return
        self._last_text, self._last_said_s = text, now_s
        message = json.dumps({"front": self._front_id, "workers": json.loads(text or "{}")})
        try:
            async with asyncio.timeout(REPEAT_S):
                await self._channel.publish(message)
        except (ChannelDown, TimeoutError):
            # Said anew as soon as it works again.
            self._last_said_s = float("-inf")

    def describe(self) -> str:
        """Returns what this front has at each worker, as JSON; empty when that is nothing."""
        fleet = self._fleet
        figures = np.vstack((fleet.queue, fleet.num_seqs, fleet.kv_tokens))
        rows = np.flatnonzero(figures.any(axis=0)).tolist()
        found = {fleet.keys[row].worker_id: figures[:, row].tolist() for row in rows}
        return json.dumps(found) if found else ""

    def take(self, text: str) -> None:
        """Takes what a front says; what cannot be read is ignored, like what this one said."""
        try:
            message = json.loads(text)
            front, workers = str(message["front"]), dict(message["workers"])
            if any(len(one) != NUM_TERMS + 2 for one in workers.values()):
                raise ValueError("not five figures a worker")
        except (ValueError, KeyError, TypeError):
            logger.warning("a load message could not be read", extra={"text": text[:100]})
            return
        if front != self._front_id:
            self._said[front] = (self._clock.now(), workers)

    def refresh(self) -> None:
        """Writes the sum over all other fronts into the fleet; the silent have nothing."""
        now_s = self._clock.now()
        self._said = {
            front: (at_s, workers)
            for front, (at_s, workers) in self._said.items()
            if now_s - at_s <= EXPIRE_S
        }
        if not self._said and not self._has_shared:
            return
        sums: dict[str, list[float]] = {}
        for _, workers in self._said.values():
            for worker_id, figures in workers.items():
                before = sums.get(worker_id, [0.0] * (NUM_TERMS + 2))
                sums[worker_id] = [a + b for a, b in zip(before, figures, strict=True)]
        self._fleet.clear_shared()
        for worker_id, figures in sums.items():
            *terms, seqs, kv_tokens = figures
            self._fleet.set_shared(WorkerId(worker_id), np.array(terms), seqs, kv_tokens)
        self._has_shared = bool(sums)

    async def _listen(self) -> None:
        is_up = True
        while True:
            try:
                async for text in self._channel.listen():
                    is_up = True
                    self.take(text)
            except ChannelDown:
                if is_up:
                    logger.warning("load channel is away, workers' reports are all there is")
                is_up = False
            await asyncio.sleep(_RECONNECT_S)
