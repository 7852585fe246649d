"""The workers of a simulated cluster, from their start to their end."""

from collections.abc import Iterator
from itertools import count
from typing import Protocol

from decode_worker.occupancy import LetGo
from decode_worker.scheduler import DecodeScheduler
from decode_worker.skipping import TokenMaker
from pdserve.engine.scheduler import ChainMaker, SchedulerLedger
from pdserve.engine.step_log import StepLog
from pdserve.request import Incarnation, Role, WorkerId
from prefill_worker.scheduler import PrefillScheduler
from router.policy import Choice
from router.worker_key import WorkerKey
from simulation.clock import EventQueue
from simulation.decode_node import DecodeNode, DecodeOutlet
from simulation.pace import Pace
from simulation.prefill_node import PrefillNode, PrefillOutlet
from simulation.routing import Brain
from simulation.schedulers import make_decode_scheduler, make_prefill_scheduler
from simulation.shape import ClusterShape

Node = PrefillNode | DecodeNode


class NodeOutlet(PrefillOutlet, DecodeOutlet, Protocol):
    """What hears of workers of both pools."""


class Nodes:
    """Makes workers and lets them go; the router's brain knows of them meanwhile."""

    def __init__(
        self,
        shape: ClusterShape,
        queue: EventQueue,
        brain: Brain,
        outlet: NodeOutlet,
        *,
        make_chain: ChainMaker,
        make_token: TokenMaker,
    ) -> None:
        """Has none."""
        self.prefills: dict[WorkerKey, PrefillNode] = {}
        self.decodes: dict[WorkerKey, DecodeNode] = {}
        self._shape = shape
        self._queue = queue
        self._brain = brain
        self._outlet = outlet
        self._make_chain = make_chain
        self._make_token = make_token
        self._incarnations = count(1)

    def __iter__(self) -> Iterator[Node]:
        yield from self.prefills.values()
        yield from self.decodes.values()

    def begin(self) -> None:
        """Starts the workers of pools that keep their sizes."""
        for role, size in (
            (Role.PREFILL, self._shape.num_prefill),
            (Role.DECODE, self._shape.num_decode),
        ):
            for number in range(size):
                self.add(role, WorkerId(f"{role}-{number}"))

    def find(self, key: WorkerKey) -> Node | None:
        """Returns a worker that lives."""
        return self.prefills.get(key) or self.decodes.get(key)

    def first_of(self, choice: Choice) -> Node | None:
        """Returns who computes a prompt by a choice, if it still lives."""
        if choice.prefill is None:
            return self.decodes.get(choice.decode)
        return self.prefills.get(choice.prefill)

    def add(self, role: Role, worker_id: WorkerId) -> WorkerKey:
        """Starts a worker, which takes requests at once."""
        shape, queue = self._shape, self._queue
        key = WorkerKey(worker_id, Incarnation(next(self._incarnations)))
        profile = shape.profile_of(role)
        granules = self._brain.join(key, role, profile)
        node: Node
        if role is Role.PREFILL:
            prefill = make_prefill_scheduler(shape, queue, self._make_chain, granules)
            node = self.prefills[key] = PrefillNode(
                key, prefill, Pace(profile), queue, self._outlet
            )
        else:
            decode = make_decode_scheduler(shape, queue, self._make_chain, granules)
            node = self.decodes[key] = DecodeNode(
                key,
                decode,
                Pace(profile),
                queue,
                self._outlet,
                self._make_token,
                skips_steps=shape.skips_steps,
            )
        if shape.scaling is not None:
            node.log = StepLog()
        return key

    def drain(self, key: WorkerKey) -> None:
        """Lets a worker take nothing new."""
        node = self.find(key)
        assert node is not None
        node.is_draining = True
        self._brain.drain(key)

    def end(self, key: WorkerKey) -> tuple[Role, float, tuple[LetGo, ...]]:
        """Ends a worker's process; returns its pool, how long it computed and what it lets go."""
        if key in self.prefills:
            prefill = self.prefills.pop(key)
            prefill.is_dead = True
            return Role.PREFILL, prefill.busy_s, ()
        decode = self.decodes.pop(key)
        decode.book_until_now()
        decode.is_dead = True
        return Role.DECODE, decode.busy_s, decode.scheduler.drain()

    def ledgers(self) -> tuple[SchedulerLedger, ...]:
        """Returns what each worker holds, after asserting that no block is lost."""
        schedulers: list[PrefillScheduler | DecodeScheduler] = [node.scheduler for node in self]
        for scheduler in schedulers:
            scheduler.check()
        return tuple(scheduler.ledger() for scheduler in schedulers)
