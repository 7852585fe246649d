"""The autoscaler over a simulated cluster, on loads that change, against a clairvoyant.

    python -m benchmarks.autoscaler [--only NAME] [--modes NAME,...] [--seed N]

Toy replicas (a mean prompt of 1000 tokens takes 0.42 s, 25 sequences make a step of 50 ms) start in
20 s and are three times as slow for 5 s more; TTFT 2 s, TPOT 50 ms. Modes: what the autoscaler's
predictor begins with.

    profile      the replicas' own laws, and samples of their steps
    learned      nothing, and samples
    measured     nothing, and no samples: speeds come from what arrives and what waits
    forgetful    as `profile`, but nothing is kept for the next burst
    clairvoyant  sizes are ordered that are computed from all rates beforehand, and start at once
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from autoscaler.settings import PoolRange, ScalingSettings
from benchmarks.report import RESULTS, machine, versions
from pdserve.predictor.profile import Profile
from pdserve.request import Role
from simulation.clairvoyant import (
    RATE_STEP_S,
    optimum_replica_s,
    optimum_sizes,
    stretches_at,
)
from simulation.cluster import Cluster
from simulation.generators import Lengths, make_shaped
from simulation.load_shapes import Rate, bursts, diurnal, idle, ramp, step
from simulation.report import Slo
from simulation.scaling_report import ScalingReport, make_scaling_report
from simulation.shape import ClusterShape, Scaling
from simulation.workload import Workload

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
LENGTHS = Lengths(mean_prompt_tokens=1000, mean_output_tokens=100, spread=0.5)
"""A mean prompt takes 0.42 s; 25 sequences make a step of 50 ms."""
PROFILE = Profile(
    worker_class="toy",
    prefill=(0.02, 0.0004, 0.0),
    decode=(0.02, 0.0012, 0.0),
    transfer=(0.001, 1e-10),
    kv_bytes_per_token=1000,
    kv_tokens=102_400,
    max_num_seqs=32,
    max_num_batched_tokens=1024,
    block_size=128,
)
SETTINGS = ScalingSettings(
    prefill=PoolRange(least=1, most=20),
    decode=PoolRange(least=1, most=20),
    ttft_s=SLO.ttft_s,
    tpot_s=SLO.tpot_s,
)
MODES = {
    "profile": Scaling(settings=SETTINGS),
    "learned": Scaling(settings=SETTINGS, profiles=()),
    "measured": Scaling(settings=SETTINGS, profiles=(), has_samples=False),
    "forgetful": Scaling(settings=replace(SETTINGS, burst_memory_s=0.0)),
    "clairvoyant": Scaling(
        settings=replace(SETTINGS, grow_pause_s=0.0, shrink_pause_s=0.0), start_s=0.0, cold_s=0.0
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A rate over some time."""

    rate: Rate
    duration_s: float
    text: str


LOADS = {
    "step": Load(rate=step(4.0, 4.8, 900.0), duration_s=1800.0, text="4 -> 4.8/s"),
    "ramp": Load(rate=ramp(1.0, 7.5, 1200.0), duration_s=1500.0, text="1 .. 7.5/s in 20 min"),
    "diurnal": Load(
        rate=diurnal(0.5, 7.5, 3600.0), duration_s=3600.0, text="0.5 .. 7.5/s, period 1 h"
    ),
    "burst": Load(
        rate=bursts(2.0, 10.0, every_s=900.0, length_s=120.0),
        duration_s=1800.0,
        text="2 -> 10/s, 2 min of 15, half an hour",
    ),
    "burst, an hour": Load(
        rate=bursts(2.0, 10.0, every_s=900.0, length_s=120.0),
        duration_s=3600.0,
        text="the same, an hour",
    ),
    "idle": Load(rate=idle(4.0, 300.0, 1500.0), duration_s=1800.0, text="silent 20 min of 30"),
}


def run_load(name: str, mode: str, seed: int) -> ScalingReport:
    """Simulates one load in one mode."""
    load, scaling = LOADS[name], MODES[mode]
    workload = make_shaped(name, load.rate, load.duration_s, LENGTHS, seed)
    shape = ClusterShape(
        prefill=PROFILE,
        decode=PROFILE,
        num_prefill=2,
        num_decode=1,
        # Prompts share nothing: what the router knows of caches may be old.
        cache_events_s=5.0,
        scaling=scaling,
    )
    cluster = Cluster(shape)
    if mode == "clairvoyant":
        for at_s, ranges in _schedule(load, workload, shape):
            assert cluster.scaler is not None
            order = partial(cluster.scaler.controller.set_ranges, *ranges)
            cluster.queue.at(at_s, order)
    run = cluster.run(workload)
    stretches = stretches_at(load.rate, load.duration_s, workload, shape)
    optimum_s = optimum_replica_s(stretches, shape, SETTINGS)
    return make_scaling_report(run, shape, SLO, optimum_s, duration_s=load.duration_s)


def _schedule(
    load: Load, workload: Workload, shape: ClusterShape
) -> Iterator[tuple[float, tuple[PoolRange, PoolRange]]]:
    """Yields when which sizes are ordered: those of each stretch, a moment before it begins."""
    stretches = stretches_at(load.rate, load.duration_s, workload, shape)
    for number, stretch in enumerate(stretches):
        sizes = optimum_sizes(stretch, shape, SETTINGS)
        prefill, decode = (PoolRange(least=sizes[role], most=sizes[role]) for role in Role)
        yield max(number * RATE_STEP_S - 1.5, 0.0), (prefill, decode)


def main() -> None:
    """Runs all and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one load")
    parser.add_argument("--modes", help="some modes, with commas between them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "autoscaler.json")
    options = parser.parse_args()
    rows = []
    for name in [options.only] if options.only else LOADS:
        for mode in options.modes.split(",") if options.modes else MODES:
            begin_s = time.process_time()
            outcome = run_load(name, mode, options.seed)
            cpu_s = time.process_time() - begin_s
            print(_line(name, mode, outcome, cpu_s), flush=True)
            row = {"load": name, "text": LOADS[name].text, "mode": mode, "seed": options.seed}
            pools = {
                role: {**asdict(pool), "times_optimum": pool.times_optimum}
                for role, pool in outcome.pools.items()
            }
            rows.append({**row, "cpu_s": cpu_s, **asdict(outcome), "pools": pools})
    _write(options.output, rows)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    """Writes rows into a file; those of other loads, modes and seeds stay."""
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    fresh = {_name(row) for row in rows}
    result = {
        "benchmark": "autoscaler",
        "machine": machine(),
        "versions": versions(),
        "slo": asdict(SLO),
        "rows": [*(row for row in known if _name(row) not in fresh), *rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _name(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[field] for field in ("load", "mode", "seed"))


def _line(name: str, mode: str, outcome: ScalingReport, cpu_s: float) -> str:
    report = outcome.report
    pools = "  ".join(
        f"{role} {pool.replica_hours:.2f} h = {pool.times_optimum:.2f} x, "
        f"{pool.reversals} reversals"
        for role, pool in outcome.pools.items()
    )
    return (
        f"{name:15} {mode:12} TTFT met {report.ttft_attainment:6.1%} TPOT met "
        f"{report.tpot_attainment:6.1%} both {report.attainment:6.1%} worst TTFT "
        f"{outcome.worst_ttft_s:5.1f} s mean TPOT {1000 * (report.tpot.mean_s or 0):3.0f} ms  "
        f"{pools}  {cpu_s:.0f} s"
    )


if __name__ == "__main__":
    main()
