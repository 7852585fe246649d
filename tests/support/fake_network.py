"""Fake workers that can reach one another."""

from pdserve.registry.base import Registry
from pdserve.request import Incarnation, Role, WorkerId
from pdserve.rpc.v1 import worker_pb2
from router.policy import WorkerKey
from tests.support.fake_script import Script
from tests.support.fake_worker import FakeWorker


class FakeNetwork:
    """Lets prefill fakes reach decode fakes, and remembers what happened."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.workers: dict[WorkerKey, FakeWorker] = {}
        self.submits: list[tuple[str, str, int]] = []
        """(worker, request, attempt)."""
        self.cancels: list[tuple[str, str, int]] = []

    def decode(self, target: worker_pb2.DecodeTarget) -> FakeWorker | None:
        key = WorkerKey(
            worker_id=WorkerId(target.worker_id), incarnation=Incarnation(target.incarnation)
        )
        worker = self.workers.get(key)
        return worker if worker is not None and worker.is_alive else None

    async def start(
        self, worker_id: str, role: Role, script: Script | None = None, **over: object
    ) -> FakeWorker:
        worker = FakeWorker(self, worker_id, role, script or Script(), **over)
        await worker.start()
        self.workers[worker.key] = worker
        return worker

    def held(self) -> dict[str, list[str]]:
        """Returns what living workers hold; empty lists are left out."""
        return {
            worker.worker_id: sorted(worker.held)
            for worker in self.workers.values()
            if worker.is_alive and worker.held
        }

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.die()
