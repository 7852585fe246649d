"""What an autoscaler sees of a simulated cluster: the same figures as of one that serves."""

from collections.abc import Callable, Collection
from itertools import count
from typing import Protocol

from autoscaler.figures import Reading, Traffic, WorkerFigures
from pdserve.engine.scheduler import Stage
from router.admission import Admission
from router.traffic import TrafficMeter
from simulation.clock import EventQueue
from simulation.decode_node import DecodeNode
from simulation.journey import Journey
from simulation.nodes import Nodes
from simulation.replicas import Replica, Replicas, ReplicaStage
from simulation.shape import ClusterShape

Alter = Callable[[float, Reading], Reading]


class Watched(Protocol):
    """The router, and the workers that live."""

    @property
    def nodes(self) -> Nodes:
        """Workers that live."""
        ...

    def traffic(self) -> Traffic:
        """Returns what the router has seen."""
        ...


class SimulatedFigures:
    """Looks at all replicas and at the router; see `autoscaler.controller.Figures`."""

    def __init__(
        self, shape: ClusterShape, queue: EventQueue, replicas: Replicas, watched: Watched
    ) -> None:
        """Has not looked yet."""
        self._shape = shape
        self._queue = queue
        self._replicas = replicas
        self._watched = watched
        self._reports = count(1)
        self.alter: Alter = _as_it_is
        """A fault: what is seen at a time instead of what is."""

    def read(self) -> Reading:
        """Returns all that is known now."""
        for node in self._watched.nodes.decodes.values():
            node.book_until_now()
        report = next(self._reports)
        reading = Reading(
            workers=tuple(self._figures_of(one, report) for one in self._replicas.all()),
            traffic=self._watched.traffic(),
        )
        return self.alter(self._queue.now(), reading)

    def _figures_of(self, one: Replica, report: int) -> WorkerFigures:
        node = None if one.key is None else self._watched.nodes.find(one.key)
        if one.key is None or node is None or one.stage is ReplicaStage.CHANGING:
            return WorkerFigures(worker_id=one.worker_id, role=one.role, is_serving=False)
        load, profile = node.scheduler.load(), self._shape.profile_of(one.role)
        scaling = self._shape.scaling
        assert scaling is not None
        samples = () if node.log is None else node.log.take()
        return WorkerFigures(
            worker_id=one.worker_id,
            role=one.role,
            is_serving=one.stage is ReplicaStage.SERVING,
            is_draining=one.stage is ReplicaStage.DRAINING,
            worker_class=profile.worker_class,
            queued_tokens=load.queued_tokens,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_held=0 if isinstance(node, DecodeNode) else node.scheduler.num_held,
            used_blocks=load.active_blocks + load.reserved_blocks,
            reserved_blocks=load.reserved_blocks,
            total_blocks=load.total_blocks,
            block_size=profile.block_size,
            max_num_seqs=profile.max_num_seqs,
            chunk_tokens=profile.max_num_batched_tokens,
            life=one.key.incarnation,
            report=report,
            samples=samples if scaling.has_samples else (),
        )


def sum_traffic(
    now_s: float,
    journeys: Collection[Journey],
    nodes: Nodes,
    meter: TrafficMeter,
    num_output_tokens: int,
    admission: Admission,
) -> Traffic:
    """Returns what a router with these requests, and workers, tells of them."""
    waiting = (
        one.arrival.at_s for one in journeys if one.first_s is None and not _is_computed(one, nodes)
    )
    return Traffic(
        num_arrived=meter.num_arrived,
        prompt_tokens=meter.uncached_tokens,
        output_tokens=num_output_tokens,
        num_waiting=admission.num_waiting,
        waiting_tokens=sum(one.request.num_prompt_tokens for one in journeys if one.is_waiting),
        oldest_s=now_s - min(waiting, default=now_s),
        num_in_flight=admission.num_in_flight,
    )


def _is_computed(journey: Journey, nodes: Nodes) -> bool:
    """Says whether a worker computes its prompt."""
    key = journey.decode if journey.prefill is None else journey.prefill
    node = None if key is None else nodes.find(key)
    return node is not None and node.scheduler.stage_of(journey.request_id) is Stage.COMPUTING


def _as_it_is(now_s: float, reading: Reading) -> Reading:
    return reading
