"""The replicas of pools that change their size: what launchers do, in virtual time.

    ordered -> starting --start_s--> serving --drain--> draining --empty, or too late--> gone
                  ^                     |
                  '------- killed ------+--flip--> changing --empty, change_s--> serving elsewhere

One that is killed starts again under its name. One that does not get empty in time to flip ends,
and starts in its new pool.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from typing import Protocol

from pdserve.request import Role, WorkerId
from router.worker_key import WorkerKey
from simulation.clock import EventQueue
from simulation.nodes import Nodes
from simulation.shape import Scaling
from simulation.spans import Span

HEARTBEAT_S = 0.5
"""After so long at most it is known that a replica is empty."""


class ReplicaStage(StrEnum):
    """Where a replica stands."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """For good."""
    CHANGING = "changing"
    """On its way to the other pool, of which it is one already."""


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, through all its lives."""

    worker_id: WorkerId
    role: Role
    stage: ReplicaStage
    span: Span
    key: WorkerKey | None = None
    """Of its present life; None while there is no process that takes work."""
    num_orders: int = 0
    """What was to come of an order before the last one does not come any more."""


class Site(Protocol):
    """Where replicas run."""

    @property
    def nodes(self) -> Nodes:
        """Workers that live."""
        ...

    def add_worker(self, role: Role, worker_id: WorkerId) -> WorkerKey:
        """Starts a worker, which takes requests at once."""
        ...

    def slow_down(self, worker: WorkerKey, factor: float) -> None:
        """Makes a worker's steps take so many times as long."""
        ...

    def retire(self, worker: WorkerKey) -> None:
        """Ends a worker that has drained, or had its time to."""
        ...


class Replicas:
    """The pools that an autoscaler orders from; see `autoscaler.controller.Pools`."""

    def __init__(self, scaling: Scaling, queue: EventQueue, site: Site) -> None:
        """Has none."""
        self._scaling = scaling
        self._queue = queue
        self._site = site
        self._numbers = {role: count() for role in Role}
        self._known: dict[WorkerId, Replica] = {}
        self.spans: list[Span] = []
        """Of all that ever were."""

    def all(self) -> tuple[Replica, ...]:
        """Returns all that are not gone, the oldest first."""
        return tuple(self._known.values())

    def begin(self, role: Role, num_replicas: int) -> None:
        """Gives a pool its first replicas, which serve already."""
        for _ in range(num_replicas):
            self._serve(self._order(role))

    def scale(self, role: Role, num_replicas: int) -> None:
        """Begins to start replicas until a pool has so many, those that start counted."""
        pool = [one for one in self._known.values() if one.role is role]
        num_active = sum(one.stage is not ReplicaStage.DRAINING for one in pool)
        for _ in range(num_replicas - num_active):
            self._start(self._order(role))

    def drain(self, worker_id: str) -> None:
        """Begins to drain a replica for good; one that only starts is gone at once.

        Raises:
            KeyError: there is no such replica any more.
        """
        one = self._known[WorkerId(worker_id)]
        if one.key is None:
            self._forget(one)
        elif one.stage is ReplicaStage.SERVING:
            self._drain(one, ReplicaStage.DRAINING)

    def flip(self, worker_id: str, role: Role) -> None:
        """Begins to drain a replica, which then goes on in another pool.

        Raises:
            KeyError: there is no such replica any more.
        """
        one = self._known[WorkerId(worker_id)]
        if one.stage is ReplicaStage.SERVING and one.role is not role:
            self._move(one, role)
            self._drain(one, ReplicaStage.CHANGING)

    def died(self, worker: WorkerKey) -> None:
        """A replica's process has ended by itself: it is started again, unless it was to leave."""
        one = self._known.get(worker.worker_id)
        if one is None or one.key != worker:
            return
        one.key = None
        if one.stage is ReplicaStage.DRAINING:
            self._forget(one)
        else:
            self._start(one)

    def _order(self, role: Role) -> Replica:
        worker_id = WorkerId(f"{role}-{next(self._numbers[role])}")
        one = Replica(worker_id, role, ReplicaStage.STARTING, self._open_span(worker_id, role))
        self._known[worker_id] = one
        return one

    def _move(self, one: Replica, role: Role) -> None:
        one.span.end_s = self._queue.now()
        one.role, one.span = role, self._open_span(one.worker_id, role)

    def _open_span(self, worker_id: WorkerId, role: Role) -> Span:
        self.spans.append(Span(worker_id, role, self._queue.now()))
        return self.spans[-1]

    def _start(self, one: Replica) -> None:
        one.stage = ReplicaStage.STARTING
        one.num_orders += 1
        self._queue.after(self._scaling.start_s, partial(self._started, one, one.num_orders))

    def _started(self, one: Replica, order: int) -> None:
        if one.num_orders != order:
            return
        self._serve(one)
        assert one.key is not None
        self._site.slow_down(one.key, self._scaling.cold_factor)
        self._queue.after(self._scaling.cold_s, partial(self._warmed_up, one.key))

    def _serve(self, one: Replica) -> None:
        one.stage = ReplicaStage.SERVING
        one.key = self._site.add_worker(one.role, one.worker_id)

    def _warmed_up(self, key: WorkerKey) -> None:
        if self._site.nodes.find(key) is not None:
            self._site.slow_down(key, 1.0)

    def _drain(self, one: Replica, stage: ReplicaStage) -> None:
        assert one.key is not None
        one.stage = stage
        one.num_orders += 1
        self._site.nodes.drain(one.key)
        until_s = self._queue.now() + self._scaling.drain_timeout_s
        self._look(one, one.num_orders, until_s)

    def _look(self, one: Replica, order: int, until_s: float) -> None:
        """Looks whether a replica is empty, again and again."""
        if one.num_orders != order or one.key is None:
            return
        node = self._site.nodes.find(one.key)
        assert node is not None
        is_late = self._queue.now() >= until_s
        if not node.is_idle and not is_late:
            self._queue.after(HEARTBEAT_S, partial(self._look, one, order, until_s))
            return
        is_empty = node.is_idle
        self._site.retire(one.key)
        one.key = None
        if one.stage is ReplicaStage.DRAINING:
            self._forget(one)
        elif is_empty:
            self._queue.after(self._scaling.change_s, partial(self._changed, one, order))
        else:
            self._start(one)

    def _changed(self, one: Replica, order: int) -> None:
        if one.num_orders == order:
            self._serve(one)

    def _forget(self, one: Replica) -> None:
        one.num_orders += 1
        one.span.end_s = self._queue.now()
        del self._known[one.worker_id]
