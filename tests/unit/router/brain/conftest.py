from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.brain_scenes import D0, P0, BrainScene, FrontScene


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[BrainScene]:
    found = BrainScene(tmp_path / "brain")
    found.join(P0, D0)
    found.start()
    yield found
    await found.stop()


@pytest.fixture
async def fronts(scene: BrainScene) -> AsyncIterator[list[FrontScene]]:
    async with AsyncExitStack() as stack:
        found = [FrontScene(name, scene.path) for name in ("a", "b")]
        for front in found:
            stack.push_async_callback(front.stop)
            await front.up()
        yield found
