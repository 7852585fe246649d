"""No change is missed between a look and a wait."""

import asyncio

from router.changes import Changes


async def test_a_change_between_the_look_and_the_wait_ends_the_wait_at_once() -> None:
    changes = Changes()
    seen = changes.count
    changes.note()
    await asyncio.wait_for(changes.wait(seen, 60.0), 1.0)


async def test_a_change_wakes_all_who_wait() -> None:
    changes = Changes()
    waits = [asyncio.create_task(changes.wait(0, 60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.note()
    await asyncio.wait_for(asyncio.gather(*waits), 1.0)


async def test_a_wait_ends_with_its_time() -> None:
    await asyncio.wait_for(Changes().wait(0, 0.0), 1.0)
