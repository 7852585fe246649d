"""A brain and fronts that meet over a real socket, in one process."""

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from pdserve.config.router import RouterConfig
from pdserve.exposition import TextExposition
from pdserve.registry.memory import MemoryRegistry
from pdserve.request import FrontId, Incarnation, Role, WorkerId
from pdserve.rpc.v1 import brain_pb2
from pdserve.timeline import MonotonicClock
from router.admission import AdmittedLoad
from router.brain.door import Door
from router.brain.link import BrainLink
from router.brain.parts import Brain
from router.brain.remote_placer import RemotePlacer, make_hello
from router.fleet import Fleet, Member
from router.load_book import LoadBook
from router.worker_key import WorkerKey
from tests.support.router_harness import eventually

P0 = WorkerKey(WorkerId("p0"), Incarnation(1))
D0 = WorkerKey(WorkerId("d0"), Incarnation(1))


class BrainScene:
    """A brain whose workers are put into its fleet by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = RouterConfig(model="m", redis_url="", brain_socket=str(path))
        clock = MonotonicClock()
        registry = MemoryRegistry(clock)
        series = CollectorRegistry()
        self.brain = Brain(config, registry, clock, FrontId("brain"), None, series, "m")
        self.door = Door(self.brain, TextExposition(series))
        self._task: asyncio.Task[None] | None = None

    def join(self, *keys: WorkerKey) -> None:
        for key in keys:
            role = Role.PREFILL if key.worker_id.startswith("p") else Role.DECODE
            member = Member(
                key=key,
                role=role,
                digest=b"",
                worker_class="c",
                total_blocks=10_000,
                block_size=16,
                chunk_tokens=1000,
            )
            fleet = self.brain.book.fleet
            fleet.join(member)
            fleet.set_available(key, is_available=True)
            fleet.hear(key, MonotonicClock().now())
            self.brain.book.restore(key)
        self.brain.pool.changes.note()

    def start(self) -> None:
        self._task = asyncio.create_task(self.door.run(self.path))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    def load(self) -> tuple[int, float, float]:
        """Returns requests charged, prompts queued, sequences on decode."""
        fleet = self.brain.book.fleet
        return self.brain.book.num_charged, fleet.queue[0].sum(), fleet.num_seqs.sum()


class FrontScene:
    """A front without clients."""

    def __init__(self, name: str, path: Path, call_timeout_s: float = 0.5) -> None:
        self.name = FrontId(name)
        self.number = ord(name) - ord("a")
        self.num_changes = 0
        self.own_load = self.others = AdmittedLoad()
        self.book = LoadBook(Fleet(), MonotonicClock())
        self.link = BrainLink(str(path), self, silence_s=0.6, call_timeout_s=call_timeout_s)
        self.placer = RemotePlacer(self.link, self.book)
        self._task = asyncio.create_task(self.link.run())

    def hello(self) -> brain_pb2.FrontHello:
        return make_hello(self.name, self.number, self.book)

    def on_change(self) -> None:
        self.num_changes += 1

    def load(self) -> AdmittedLoad:
        return self.own_load

    def on_load(self, others: AdmittedLoad) -> None:
        self.others = others

    async def on_question(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReply:
        return brain_pb2.FrontReply(metrics=f"{self.name}\n")

    async def up(self) -> None:
        await eventually(lambda: self.link.is_up)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))
