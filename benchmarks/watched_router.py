"""A router front that notes how long its event loop did not turn.

`python -m benchmarks.watched_router STALLS_FILE FLAGS`, with FLAGS of `pdserve router`. A line per
tick that came late: when (CLOCK_MONOTONIC), by how many seconds, and how much of that was CPU time
of the loop's own thread.
"""

import asyncio
import sys
import time

import uvloop

from launcher.roles.entry import run_router
from pdserve.config.router import RouterConfig
from pdserve.log import configure_logging
from router.server import serve

TICK_S = 0.001
LEAST_S = 0.002


async def watch(path: str) -> None:
    """Ticks for ever."""
    with open(path, "w", buffering=1) as file:  # noqa: ASYNC230
        while True:
            before_s, before_cpu_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            late_s = now_s - before_s - TICK_S
            if late_s > LEAST_S:
                file.write(f"{now_s} {late_s} {time.thread_time() - before_cpu_s}\n")


def run(config: RouterConfig) -> int:
    """Serves and watches."""
    path = _path

    async def both() -> None:
        watching = asyncio.create_task(watch(path))
        try:
            await serve(config)
        finally:
            watching.cancel()

    configure_logging(fields={"process": "router"})
    uvloop.run(both())
    return 0


if __name__ == "__main__":
    _path = sys.argv.pop(1)
    sys.exit(run_router(run))
