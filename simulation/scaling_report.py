"""What an autoscaler's decisions came to: what was kept, what was paid, how often it turned."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoscaler.figures import Decision
from pdserve.request import Role
from simulation.record import Record
from simulation.report import Report, Slo, make_report
from simulation.shape import ClusterRun, ClusterShape
from simulation.spans import replica_s, size_at

REVERSALS_WITHIN_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReport:
    """One pool over a whole run."""

    replica_hours: float
    """Paid for: from the order to start until gone."""
    optimum_hours: float
    """Of somebody who knows all rates beforehand; see `simulation.clairvoyant`."""
    utilization: float
    """Share of what was paid in which replicas computed."""
    mean_size: float
    most: int
    num_decisions: int
    reversals: int
    """Changes of direction, the most within ten minutes."""

    @property
    def times_optimum(self) -> float:
        """What was paid, over the optimum."""
        return self.replica_hours / self.optimum_hours if self.optimum_hours else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingReport:
    """A run of pools that were sized."""

    report: Report
    """Of the requests; its cost counts the GPUs that were paid for."""
    worst_ttft_s: float
    pools: Mapping[Role, PoolReport]
    gpu_hours: float
    decisions: tuple[Decision, ...]
    """All, each with its numbers."""


def make_scaling_report(
    run: ClusterRun,
    shape: ClusterShape,
    slo: Slo,
    optimum_s: Mapping[Role, float],
    *,
    duration_s: float,
    begin_s: float = 0.0,
) -> ScalingReport:
    """Sums a run up.

    Args:
        run: of a shape with a scaling.
        shape: of the cluster.
        slo: objectives.
        optimum_s: replica seconds of the clairvoyant, from the begin on.
        duration_s: what is paid until then counts.
        begin_s: what comes and what is paid before does not count.
    """
    records = [one for one in run.records if one.at_s >= begin_s]
    spent_s = replica_s(run.spans, begin_s, duration_s)
    gpu_s = sum(spent_s[role] * shape.gpus_of(role) for role in Role)
    seconds = duration_s - begin_s
    return ScalingReport(
        report=make_report(records, run, slo, gpu_s / seconds),
        worst_ttft_s=worst_ttft_s(records, run.end_s),
        pools={
            role: PoolReport(
                replica_hours=spent_s[role] / 3600,
                optimum_hours=optimum_s[role] / 3600,
                utilization=sum(run.busy_s[role]) / (run.worker_s(role) or 1.0),
                mean_size=spent_s[role] / seconds,
                most=most_replicas(run, role),
                num_decisions=sum(one.role is role for one in run.decisions),
                reversals=most_reversals(run.decisions, role),
            )
            for role in Role
        },
        gpu_hours=gpu_s / 3600,
        decisions=tuple(run.decisions),
    )


def worst_ttft_s(records: Iterable[Record], end_s: float) -> float:
    """Returns the longest wait for a first token; one that never came counts until the end."""
    waits = (end_s - one.at_s if one.ttft_s is None else one.ttft_s for one in records)
    return max(waits, default=0.0)


def most_replicas(run: ClusterRun, role: Role) -> int:
    """Returns the largest size of a pool."""
    return max((size_at(run.spans, role, one.begin_s) for one in run.spans), default=0)


def most_reversals(
    decisions: Iterable[Decision], role: Role, within_s: float = REVERSALS_WITHIN_S
) -> int:
    """Returns the most changes of a pool's direction within any ten minutes."""
    turns = []
    for before, after in pairwise(_directions(decisions, role)):
        if before[1] != after[1]:
            turns.append(after[0])
    return max((_count_within(turns, begin_s, within_s) for begin_s in turns), default=0)


def _directions(decisions: Iterable[Decision], role: Role) -> list[tuple[float, bool]]:
    """Returns when a pool changed, and whether it grew: who flips leaves the other one."""
    return [
        (one.at_s, one.role is role and one.kind != "shrink")
        for one in decisions
        if one.role is role or one.kind == "flip"
    ]


def _count_within(times: Sequence[float], begin_s: float, within_s: float) -> int:
    return sum(begin_s <= at_s < begin_s + within_s for at_s in times)
