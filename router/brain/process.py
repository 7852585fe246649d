"""The brain of several fronts as a process: start, serve, end.

It holds nothing that its end could lose: fronts tell the next one what they have in flight.
"""

import asyncio
import gc
import logging
import secrets
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry, Gauge

from pdserve.config.load import tell_by_flags
from pdserve.config.router import RouterConfig
from pdserve.errors import ConfigError
from pdserve.exposition import TextExposition, join_expositions
from pdserve.line_output import write_line
from pdserve.log import configure_logging
from pdserve.metrics import serve_exposition
from pdserve.registry.redis import RedisRegistry
from pdserve.request import FrontId
from pdserve.rpc.v1 import brain_pb2, worker_pb2
from pdserve.timeline import MonotonicClock
from router.brain.door import Door
from router.brain.parts import Brain
from router.metrics import LABELS
from router.redis_loads import RedisLoadChannel
from router.run_settings import EXIT_CONFIG, GC_THRESHOLDS
from router.worker_key import WorkerKey

logger = logging.getLogger(__name__)

_FIGURES_S = 0.5
_SCRAPE_TIMEOUT_S = 2.0


class Observer:
    """Listens to workers on behalf of nobody: requests are the fronts'."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        """Has taken nothing in: the pool took what the worker says of itself."""

    def on_worker_lost(self, worker: WorkerKey, why: str) -> None:
        """Drops what a dead worker held."""
        self._brain.placer.forget(worker)

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        """Returns nothing: no request came by here."""
        return []


class _AllSeries:
    """What a scrape shows: the brain's series and those of all fronts."""

    def __init__(self, door: Door, loop: asyncio.AbstractEventLoop) -> None:
        self._door = door
        self._loop = loop

    def generate(self) -> bytes:
        """Asks all fronts; called from threads that are not the loop's."""
        asked = self._door.ask(brain_pb2.FrontQuestion(metrics=True))
        found = asyncio.run_coroutine_threadsafe(asked, self._loop).result(_SCRAPE_TIMEOUT_S)
        return join_expositions([reply.metrics for reply in found.replies]).encode()


async def serve(config: RouterConfig) -> None:
    """Runs the brain until SIGTERM or SIGINT.

    Raises:
        ConfigError: something the user can mend.
    """
    assert config.brain_socket is not None
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    gc.set_threshold(*GC_THRESHOLDS)
    front_id = FrontId(f"brain-{secrets.token_hex(8)}")
    model_name = config.served_model_name or Path(config.model).name
    series = CollectorRegistry()
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(RedisRegistry(config.redis_url, config.cluster))
        loads = await stack.enter_async_context(RedisLoadChannel(config.redis_url, config.cluster))
        brain = Brain(config, registry, MonotonicClock(), front_id, loads, series, model_name)
        brain.pool.listen(Observer(brain))
        door = Door(brain, TextExposition(series))
        for name, text, figure in (
            ("pdserve_router_fronts", "Fronts.", lambda: door.num_fronts),
            (
                "pdserve_router_turns_waiting",
                "Wait for a turn.",
                lambda: len(brain.room),
            ),
            (
                "pdserve_router_charged",
                "Are at workers.",
                lambda: brain.book.num_charged,
            ),
        ):
            gauge = Gauge(name, text, LABELS, registry=series)
            gauge.labels(model_name, "brain", "router").set_function(figure)
        metrics = serve_exposition(_AllSeries(door, loop), config.host, config.metrics_port)
        stack.callback(metrics.close)
        works = [
            *brain.works(),
            ("door", door.run(Path(config.brain_socket))),
        ]
        tasks = [asyncio.create_task(work, name=name) for name, work in works]
        stack.push_async_callback(brain.pool.close)
        stack.push_async_callback(_cancel, tasks)
        write_line(sys.stdout, f"brain ready: metrics http://{metrics.address}/metrics")
        while not stopped.is_set():
            brain.note_figures()
            broken = next((task for task in tasks if task.done()), None)
            if broken is not None:
                # Raises what ended it: a brain without one of its parts is none.
                await broken
            try:
                async with asyncio.timeout(_FIGURES_S):
                    await stopped.wait()
            except TimeoutError:
                pass  # time to look again


def run(config: RouterConfig) -> int:
    """Runs a brain in this process; returns the exit status (0 told to end, 2 bad settings)."""
    configure_logging(config.log_level, fields={"process": "brain"})
    try:
        uvloop.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"error: {tell_by_flags(error, RouterConfig)}\n")
        return EXIT_CONFIG
    return 0


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
