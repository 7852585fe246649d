"""What pools of MIN..MAX would have cost over a trace, next to a plan that keeps its sizes."""

from dataclasses import dataclass, replace

from autoscaler.settings import PoolRange
from pdserve.predictor.profile import Profile
from simulation.clairvoyant import optimum_replica_s, stretches_of
from simulation.cluster import Cluster
from simulation.piece_chain import PromptChains
from simulation.report import Report, Slo, make_report
from simulation.scaling_report import ScalingReport, make_scaling_report, worst_ttft_s
from simulation.shape import ClusterShape, Scaling
from simulation.workload import Workload

WINDOW_S = 60.0
"""The clairvoyant knows the rate of each minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRun:
    """A plan of fixed sizes, over the same requests."""

    num_prefill: int
    num_decode: int
    gpu_hours: float
    worst_ttft_s: float
    report: Report


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledPlan:
    """What the autoscaler would have done."""

    profile: Profile
    scaling: Scaling
    scaled: ScalingReport
    fixed: FixedRun | None
    """None: no plan of fixed sizes was found."""
    duration_s: float
    num_requests: int


def make_scaled_plan(
    workload: Workload,
    profile: Profile,
    scaling: Scaling,
    slo: Slo,
    *,
    first_sizes: tuple[int, int],
    fixed_sizes: tuple[int, int] | None,
) -> ScaledPlan:
    """Simulates all requests once with pools that are sized, and once with those that are not.

    Args:
        workload: the requests.
        profile: of all replicas.
        scaling: ranges, and how long starts take.
        slo: objectives; the autoscaler's targets are in the scaling.
        first_sizes: prefill and decode replicas at the beginning.
        fixed_sizes: those of the plan to compare with.
    """
    chains = PromptChains()
    shape = ClusterShape(
        prefill=profile,
        decode=profile,
        num_prefill=first_sizes[0],
        num_decode=first_sizes[1],
        tpot_slo_s=slo.tpot_s,
        scaling=scaling,
    )
    duration_s = workload.arrivals[-1].at_s
    scaled = make_scaling_report(
        Cluster(shape, chains=chains).run(workload),
        shape,
        slo,
        optimum_replica_s(stretches_of(workload, shape, WINDOW_S), shape, scaling.settings),
        duration_s=duration_s,
    )
    fixed = None
    if fixed_sizes is not None:
        num_prefill, num_decode = fixed_sizes
        shape = replace(shape, num_prefill=num_prefill, num_decode=num_decode, scaling=None)
        run = Cluster(shape, chains=chains).run(workload)
        fixed = FixedRun(
            num_prefill=num_prefill,
            num_decode=num_decode,
            gpu_hours=shape.num_gpus * duration_s / 3600,
            worst_ttft_s=worst_ttft_s(run.records, run.end_s),
            report=make_report(run.records, run, slo, shape.num_gpus),
        )
    return ScaledPlan(
        profile=profile,
        scaling=scaling,
        scaled=scaled,
        fixed=fixed,
        duration_s=duration_s,
        num_requests=len(workload.arrivals),
    )


COLUMNS = (
    "pools",
    "P : D, mean",
    "most",
    "replica hours",
    "GPU hours",
    "kept TTFT",
    "kept both",
    "TTFT p99 s",
    "worst",
    "GPU s / 1M tokens",
)


def rows_of(plan: ScaledPlan) -> list[tuple[str, ...]]:
    """Returns the lines of a table: fixed sizes, sizes of the autoscaler, the clairvoyant's."""
    rows = []
    if plan.fixed is not None:
        rows.append(_fixed_row(plan.fixed, plan.duration_s))
    pools, hours = plan.scaled.pools.values(), plan.duration_s / 3600
    report = plan.scaled.report
    settings = plan.scaling.settings
    rows.append(
        (
            f"autoscaled {_bounds(settings.prefill)} : {_bounds(settings.decode)}",
            " : ".join(f"{pool.mean_size:.2f}" for pool in pools),
            " : ".join(f"{pool.most}" for pool in pools),
            " : ".join(_hours(pool.replica_hours) for pool in pools),
            _hours(plan.scaled.gpu_hours),
            f"{report.ttft_attainment:.1%}",
            f"{report.attainment:.1%}",
            _seconds(report.ttft.p99_s),
            f"{plan.scaled.worst_ttft_s:.1f}",
            f"{report.gpu_s_per_million_tokens:.0f}",
        )
    )
    rows.append(
        (
            "clairvoyant, computed",
            " : ".join(f"{pool.optimum_hours / hours:.2f}" for pool in pools),
            "",
            " : ".join(_hours(pool.optimum_hours) for pool in pools),
            _hours(sum(p.optimum_hours for p in pools) * max(plan.profile.num_gpus, 1)),
            *[""] * 5,
        )
    )
    return rows


def _fixed_row(fixed: FixedRun, duration_s: float) -> tuple[str, ...]:
    sizes, report = (fixed.num_prefill, fixed.num_decode), fixed.report
    return (
        "fixed",
        " : ".join(str(size) for size in sizes),
        " : ".join(str(size) for size in sizes),
        " : ".join(_hours(size * duration_s / 3600) for size in sizes),
        _hours(fixed.gpu_hours),
        f"{report.ttft_attainment:.1%}",
        f"{report.attainment:.1%}",
        _seconds(report.ttft.p99_s),
        f"{fixed.worst_ttft_s:.1f}",
        f"{report.gpu_s_per_million_tokens:.0f}",
    )


def _bounds(pool: PoolRange) -> str:
    return f"{pool.most}" if pool.is_fixed else f"{pool.least}..{pool.most}"


def _hours(value: float) -> str:
    """Also of a trace of seconds."""
    return f"{value:.3g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
