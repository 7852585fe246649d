"""Who serves, who starts, who leaves; and how long starting and draining take."""

from collections.abc import Iterable
from dataclasses import dataclass

from autoscaler.figures import WorkerFigures
from pdserve.request import Role

_KEEP = 0.5
"""Of a mean, when another sample comes."""


@dataclass(slots=True)
class _Life:
    figures: WorkerFigures
    seen_s: float
    served_s: float | None
    """When it last served."""
    draining_s: float | None
    has_flipped: bool = False
    """It came from the other pool with its weights."""


class Roster:
    """Remembers what is known of each replica over a registry that forgets. One thread."""

    def __init__(
        self, *, lost_s: float, start_s: float, drain_s: float, change_s: float = 1.0
    ) -> None:
        """Knows nobody; takes the times to assume until they were seen."""
        self._lost_s = lost_s
        self._lives: dict[str, _Life] = {}
        self.start_s = {Role.PREFILL: start_s, Role.DECODE: start_s}
        self.drain_s = {Role.PREFILL: drain_s, Role.DECODE: drain_s}
        self.flip_s = {Role.PREFILL: drain_s + change_s, Role.DECODE: drain_s + change_s}
        """By the role that a replica came to, from the order until it served."""

    def update(self, now_s: float, workers: Iterable[WorkerFigures]) -> None:
        """Takes all replicas as of now; one that is missing is gone."""
        known = {}
        for worker in workers:
            life = self._lives.pop(worker.worker_id, None)
            if life is None:
                # One that serves at once was started when nobody looked.
                life = _Life(worker, now_s, None, None)
            elif life.figures.role is not worker.role:
                life = _Life(worker, now_s, None, None, has_flipped=True)
            elif worker.is_serving and life.served_s is None and life.draining_s is None:
                means = self.flip_s if life.has_flipped else self.start_s
                self._learn(means, worker.role, now_s - life.seen_s)
            if worker.is_serving:
                life.served_s = now_s
            if worker.is_draining and life.draining_s is None:
                life.draining_s = now_s
            life.figures = worker
            known[worker.worker_id] = life
        for life in self._lives.values():
            if life.draining_s is not None and life.served_s is not None:
                self._learn(self.drain_s, life.figures.role, now_s - life.draining_s)
        self._lives = known

    def serving(self, role: Role, now_s: float) -> list[WorkerFigures]:
        """Returns those that take work, or did a moment ago and may only be unheard."""
        return [
            life.figures
            for life in self._of(role)
            if life.served_s is not None and now_s - life.served_s <= self._lost_s
        ]

    def starting(self, role: Role, now_s: float) -> list[WorkerFigures]:
        """Returns those that will take work, the newest last."""
        return [
            life.figures
            for life in self._of(role)
            if life.served_s is None or now_s - life.served_s > self._lost_s
        ]

    def coming_s(self, role: Role, now_s: float) -> float:
        """Returns how long those that start now will have served when one more could have started.

        In seconds of all of them together.
        """
        start_s = self.start_s[role]
        return sum(
            min(now_s - life.seen_s, start_s) for life in self._of(role) if life.served_s is None
        )

    def draining(self, role: Role) -> list[WorkerFigures]:
        """Returns those that leave."""
        return [
            life.figures
            for life in self._lives.values()
            if life.figures.role is role and life.draining_s is not None
        ]

    def _of(self, role: Role) -> list[_Life]:
        return [
            life
            for life in self._lives.values()
            if life.figures.role is role and life.draining_s is None
        ]

    def _learn(self, means: dict[Role, float], role: Role, seconds: float) -> None:
        means[role] = _KEEP * means[role] + (1 - _KEEP) * seconds
