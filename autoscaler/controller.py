"""Carries out what the policy decides: figures in once a second, orders to the pools out."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from autoscaler.figures import Decision, Numbers, Reading, WorkerFigures
from autoscaler.policy import POOLS, ScalingPolicy
from autoscaler.sample_feed import SampleFeed
from autoscaler.settings import PoolRange, ScalingSettings
from pdserve.errors import PdserveError
from pdserve.predictor.predictor import Predictor
from pdserve.request import Role
from pdserve.timeline import Clock

logger = logging.getLogger(__name__)

TICK_S = 1.0


class Pools(Protocol):
    """What changes its size: replicas of this machine, of Ray or of Kubernetes."""

    def scale(self, role: Role, num_replicas: int) -> None:
        """Begins to start replicas until the pool has so many, those that start counted.

        Raises:
            PdserveError: it cannot now; the next round tries again.
        """
        ...

    def drain(self, worker_id: str) -> None:
        """Begins to drain one replica for good: it finishes or hands over what it has.

        Raises:
            PdserveError: it cannot now; the next round tries again.
            KeyError: there is no such replica any more.
        """
        ...

    def flip(self, worker_id: str, role: Role) -> None:
        """Begins to drain one replica, which then goes on in the other pool with its weights.

        Counted there from now on. Only where `flips_in_place` is set.

        Raises:
            PdserveError: it cannot now; the next round tries again.
            KeyError: there is no such replica any more.
        """
        ...


class Figures(Protocol):
    """Where a controller looks."""

    def read(self) -> Reading:
        """Returns all that is known now; does not raise when something does not answer."""
        ...


class Controller:
    """Sizes the pools of one cluster. `run` has a thread of its own; the rest is for any thread."""

    def __init__(
        self,
        settings: ScalingSettings,
        figures: Figures,
        pools: Pools,
        clock: Clock,
        *,
        predictor: Predictor,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Does nothing yet.

        Args:
            settings: ranges and targets.
            figures: what to look at.
            pools: what to order from.
            clock: monotonic time.
            predictor: knows what profiles say, or nothing; fed from here on with what replicas
                report. Nobody else may use it.
            report: takes a line for each decision.
        """
        self._settings = settings
        self._figures = figures
        self._pools = pools
        self._clock = clock
        self._report = report
        self._policy = ScalingPolicy(settings, predictor)
        self._feed = SampleFeed(predictor)
        self._lock = threading.Lock()
        """Of the policy, its predictor and its settings."""
        self._num_flips = 0
        """By somebody's order."""
        self._has_figures = False
        self._workers: tuple[WorkerFigures, ...] = ()

    @property
    def settings(self) -> ScalingSettings:
        """As of now."""
        return self._settings

    @property
    def numbers(self) -> Numbers:
        """What is known of each pool; of none while no router has answered."""
        with self._lock:
            return self._policy.numbers if self._has_figures else {}

    def find_worker(self, worker_id: str) -> WorkerFigures | None:
        """Returns a replica as of the last look; None before the first one.

        Raises:
            KeyError: there is no such replica.
        """
        workers = self._workers
        if not workers:
            return None
        found = next((one for one in workers if one.worker_id == worker_id), None)
        if found is None:
            raise KeyError(worker_id)
        return found

    def history(self) -> tuple[tuple[float, Decision], ...]:
        """Returns the last decisions, oldest first, each with its age in seconds."""
        now_s = self._clock.now()
        with self._lock:
            return tuple((now_s - decision.at_s, decision) for decision in self._policy.history)

    def set_ranges(self, prefill: PoolRange | None, decode: PoolRange | None) -> None:
        """Changes bounds from now on.

        Raises:
            ConfigError: they cannot be.
        """
        with self._lock:
            self._settings = self._with_ranges(prefill, decode)
            self._policy.use(self._settings)

    def flip(self, worker_id: str, role: Role) -> None:
        """Lets one replica go on in the other pool, by somebody's order.

        Fixed sizes move along, and a range that the new sizes are not in is stretched to hold them:
        otherwise the next round would undo it.

        Raises:
            KeyError: there is no such replica.
            PdserveError: it cannot.
        """
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        with self._lock:
            numbers, settings = self._policy.numbers, self._settings
            left = settings.range_of(other).moved(-1, numbers[other].num_active)
            joined = settings.range_of(role).moved(1, numbers[role].num_active)
            prefill, decode = (joined, left) if role is Role.PREFILL else (left, joined)
            changed = self._with_ranges(prefill, decode)
            self._pools.flip(worker_id, role)
            self._num_flips += 1
            self._settings = changed
            self._policy.use(changed)
        self._report(f"{role}: {worker_id} comes from the {other} pool, as ordered")

    def preview(self, prefill: PoolRange | None, decode: PoolRange | None) -> list[str]:
        """Says what other bounds would change at once.

        Raises:
            ConfigError: they cannot be.
        """
        settings = self._with_ranges(prefill, decode)
        lines = []
        with self._lock:
            for role in POOLS:
                if not self._has_figures:
                    bounds = settings.range_of(role)
                    lines.append(f"{role}: no figures yet, then {bounds.least}..{bounds.most}")
                    continue
                active = self._policy.numbers[role].num_active
                size = settings.range_of(role).clamp(active)
                if size > active:
                    lines.append(f"{role}: {size - active} more would start: {active} -> {size}")
                elif size < active:
                    names = self._policy.leavers(self._clock.now(), role, active - size)
                    lines.append(f"{role}: {', '.join(names)} would leave: {active} -> {size}")
                else:
                    lines.append(f"{role}: stays at {active}")
        return lines

    def run(self, stopped: threading.Event) -> None:
        """Decides once a second until it is told to stop."""
        while not stopped.is_set():
            try:
                self.tick()
            except Exception:
                # A cluster without its autoscaler is worse than a round that was lost.
                logger.exception("a round of scaling failed")
            stopped.wait(TICK_S)

    def tick(self) -> tuple[Decision, ...]:
        """Looks, decides, orders."""
        num_flips = self._num_flips
        reading = self._figures.read()
        with self._lock:
            # Told once: taken whatever becomes of the rest.
            self._feed.take(reading.workers)
            if num_flips != self._num_flips:
                # Somebody has moved a replica meanwhile: these figures show it where it was.
                return ()
            self._workers = reading.workers
            decisions = self._policy.decide(self._clock.now(), reading)
            self._has_figures |= reading.traffic is not None
        for decision in decisions:
            line = decision.describe()
            logger.info("scaling", extra={"decision": line})
            self._report(line)
            self._carry_out(decision)
        return decisions

    def _carry_out(self, decision: Decision) -> None:
        try:
            for worker_id in decision.retired:
                if decision.kind == "flip" and self._settings.flips_in_place:
                    self._pools.flip(worker_id, decision.role)
                else:
                    self._pools.drain(worker_id)
            if decision.kind == "grow":
                self._pools.scale(decision.role, decision.size)
            # After a flip by drain and start, the pool grows as soon as the other has let go.
        except KeyError as error:
            self._report(f"{decision.role}: {error.args[0]} is gone already")
        except PdserveError as error:
            self._report(f"{decision.role}: not done: {error}")

    def _with_ranges(self, prefill: PoolRange | None, decode: PoolRange | None) -> ScalingSettings:
        settings = self._settings
        return replace(
            settings, prefill=prefill or settings.prefill, decode=decode or settings.decode
        )
