"""Events of several requests in one sequence, each with the position of its request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pdserve.errors import PdserveError
from router.active import ActiveRequest
from router.intake import Event, events_of


async def merge_events(actives: Sequence[ActiveRequest]) -> AsyncGenerator[tuple[int, Event]]:
    """Yields events as they come, of whichever request.

    Raises:
        PdserveError: one of them ended with an error; the others are the caller's to cancel.
    """
    if len(actives) == 1:
        async for event in events_of(actives[0]):
            yield 0, event
        return
    # One place: while the client is slow, output waits in the requests' own bounded buffers.
    queue: asyncio.Queue[tuple[int, Event | PdserveError | None]] = asyncio.Queue(maxsize=1)
    pumps = [
        asyncio.create_task(_pump(position, active, queue))
        for position, active in enumerate(actives)
    ]
    try:
        num_running = len(pumps)
        while num_running:
            position, item = await queue.get()
            if isinstance(item, PdserveError):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield position, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(
    position: int,
    active: ActiveRequest,
    queue: asyncio.Queue[tuple[int, Event | PdserveError | None]],
) -> None:
    try:
        async for event in events_of(active):
            await queue.put((position, event))
    except PdserveError as error:
        await queue.put((position, error))
    else:
        await queue.put((position, None))
