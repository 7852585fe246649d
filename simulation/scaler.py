"""The autoscaler of production over simulated replicas: its controller, in virtual time."""

from collections.abc import Callable
from typing import Protocol

from autoscaler.controller import TICK_S, Controller
from autoscaler.figures import Decision
from pdserve.predictor.predictor import Predictor
from pdserve.request import Role
from simulation.clock import EventQueue
from simulation.readings import SimulatedFigures, Watched
from simulation.replicas import Replicas, Site
from simulation.shape import ClusterShape


class Scaled(Site, Watched, Protocol):
    """A cluster whose pools are sized."""


class Scaler:
    """Looks, decides and orders once a second of virtual time."""

    def __init__(
        self,
        shape: ClusterShape,
        queue: EventQueue,
        cluster: Scaled,
        has_more: Callable[[], bool],
    ) -> None:
        """Gives both pools their first replicas; nothing is decided yet.

        Args:
            shape: of the cluster, with a scaling.
            queue: virtual time.
            cluster: to look at and to order from.
            has_more: whether anything may come any more: else virtual time would have no end.
        """
        scaling = shape.scaling
        assert scaling is not None
        self._queue = queue
        self._has_more = has_more
        self.replicas = Replicas(scaling, queue, cluster)
        self.figures = SimulatedFigures(shape, queue, self.replicas, cluster)
        profiles = scaling.profiles
        if profiles is None:
            profiles = (shape.prefill,) if shape.is_uniform else (shape.prefill, shape.decode)
        self.controller = Controller(
            scaling.settings,
            self.figures,
            self.replicas,
            queue,
            predictor=Predictor(profiles),
        )
        self.decisions: list[Decision] = []
        """All, each with its numbers."""
        self.replicas.begin(Role.PREFILL, shape.num_prefill)
        self.replicas.begin(Role.DECODE, shape.num_decode)

    def begin(self) -> None:
        """Decides from the next second on."""
        self._queue.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self.decisions += self.controller.tick()
        if self._has_more():
            self._queue.after(TICK_S, self._tick)
