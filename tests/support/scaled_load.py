"""A simulated cluster whose pools are sized, under a load that changes."""

from collections.abc import Callable
from dataclasses import replace

from autoscaler.figures import Reading
from autoscaler.settings import PoolRange, ScalingSettings
from benchmarks.autoscaler import LENGTHS, PROFILE, SETTINGS, SLO
from pdserve.predictor.profile import Profile
from pdserve.request import Role
from router.worker_key import WorkerKey
from simulation.clairvoyant import optimum_replica_s, stretches_at
from simulation.cluster import Cluster
from simulation.generators import Lengths, make_shaped
from simulation.load_shapes import Rate
from simulation.replicas import Replica
from simulation.scaling_report import ScalingReport, make_scaling_report
from simulation.shape import ClusterRun, ClusterShape, Scaling
from simulation.workload import Workload


class ScaledLoad:
    """One run, and what it came to."""

    def __init__(
        self,
        rate: Rate,
        duration_s: float,
        *,
        sizes: tuple[int, int] = (2, 1),
        settings: ScalingSettings = SETTINGS,
        seed: int = 1,
        lengths: Lengths = LENGTHS,
        workload: Workload | None = None,
        actual: Profile = PROFILE,
        cache_events_s: float = 5.0,
        **scaling: object,
    ) -> None:
        """Prompts share nothing by default: what the router knows of caches may be old."""
        self.rate, self.duration_s = rate, duration_s
        self.workload = workload or make_shaped("load", rate, duration_s, lengths, seed)
        self.settings = settings
        self.shape = ClusterShape(
            prefill=actual,
            decode=actual,
            num_prefill=sizes[0],
            num_decode=sizes[1],
            cache_events_s=cache_events_s,
            scaling=Scaling(settings=settings, **scaling),  # type: ignore[arg-type]
        )
        self.cluster = Cluster(self.shape)
        self.readings: dict[float, Reading] = {}
        self.alter: Callable[[float, Reading], Reading] = lambda _, reading: reading
        assert self.cluster.scaler is not None
        self.scaler = self.cluster.scaler
        self.replicas = self.scaler.replicas
        self.scaler.figures.alter = self._note

    def _note(self, now_s: float, reading: Reading) -> Reading:
        self.readings[now_s] = reading
        return self.alter(now_s, reading)

    def at(self, at_s: float, happening: Callable[[], None]) -> None:
        """Lets something happen at a time."""
        self.cluster.queue.at(at_s, happening)

    def run(self) -> ScalingReport:
        """Runs it; no block may be lost."""
        self.result: ClusterRun = self.cluster.run(self.workload)
        for ledger in self.cluster.nodes.ledgers():
            assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks
        stretches = stretches_at(self.rate, self.duration_s, self.workload, self.shape)
        return make_scaling_report(
            self.result,
            self.shape,
            SLO,
            optimum_replica_s(stretches, self.shape, self.settings),
            duration_s=self.duration_s,
        )

    def attainment(self, after_s: float) -> float:
        """Returns the share of requests from then on that kept their TTFT."""
        late = [one for one in self.result.records if one.at_s >= after_s]
        assert late
        met = [one for one in late if one.ttft_s is not None and one.ttft_s <= SLO.ttft_s]
        return len(met) / len(late)

    def sizes(self, role: Role, begin_s: float, end_s: float) -> set[int]:
        """Returns the sizes that a pool had, those that only start counted."""
        return {
            sum(one.role is role and not one.is_draining for one in reading.workers)
            for at_s, reading in self.readings.items()
            if begin_s <= at_s < end_s
        }

    def replica(self, name: str) -> Replica:
        """Returns a replica that is not gone."""
        return next(one for one in self.replicas.all() if one.worker_id == name)

    def key(self, name: str) -> WorkerKey:
        """Returns its present life."""
        key = self.replica(name).key
        assert key is not None
        return key


def fixed(prefill: int, decode: int, **over: object) -> ScalingSettings:
    """Returns settings that keep both pools at their sizes."""
    return replace(
        SETTINGS,
        prefill=PoolRange(least=prefill, most=prefill),
        decode=PoolRange(least=decode, most=decode),
        **over,  # type: ignore[arg-type]
    )
