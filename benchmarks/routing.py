"""Our router's choices against other routers' policies, simulated: workloads x policies.

    python -m benchmarks.routing [--trace MOONCAKE] [--requests N] [--rate R] [--only NAME]
    python -m benchmarks.routing --merge PART.json ...   what several runs have found, in one file

All policies run over the same production modules and know the same: only the choice differs, see
`simulation.baselines`. Rates are set so that the best policy is near saturation.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.report import RESULTS
from pdserve.predictor.profile import Profile
from simulation.baselines import BASELINES
from simulation.cluster import Cluster
from simulation.generators import Lengths, make_agent_tree, make_hot_prefix, make_plain
from simulation.profile_files import find_profile
from simulation.report import Report, Slo, make_report
from simulation.routing import make_joint_policy
from simulation.sampling import take_busiest, take_stretch
from simulation.shape import ClusterShape
from simulation.traces import read_trace
from simulation.workload import Workload, scale_rate

OURS = "pdserve"
POLICIES = {OURS: make_joint_policy, **BASELINES}
SEED = 6
SLO = Slo(ttft_s=2.0, tpot_s=0.03)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload, and the pools that serve it."""

    name: str
    workload: Workload
    num_prefill: int
    num_decode: int
    num_warm_up: int = 0
    cache_share: float = 1.0
    """Of the profile's cache: what tenants with other prefixes leave."""
    slo: Slo = SLO


def make_cases(
    trace: Path | None, num_requests: int, seed: int = SEED, stretch: int | None = None
) -> list[Case]:
    """Makes the workloads; the first third of each only fills caches and queues.

    Args:
        trace: one workload more, a part of this trace.
        num_requests: of each workload.
        seed: of those that are made up.
        stretch: takes the n-th part of the trace that is so long; None: the busiest.
    """
    cases = _make_generated(num_requests, seed)
    if trace is not None:
        cases.append(_make_traced(trace, num_requests, stretch))
    return cases


def _make_generated(num_requests: int, seed: int) -> list[Case]:
    lengths = Lengths()
    num_warm_up = num_requests // 3
    plain = Case(
        name="poisson",
        workload=make_plain(num_requests, 190.0, lengths, seed),
        num_prefill=8,
        num_decode=8,
        num_warm_up=num_warm_up,
        slo=Slo(ttft_s=0.5, tpot_s=0.03),
    )
    return [
        plain,
        replace(
            plain,
            name="gamma bursts",
            workload=make_plain(num_requests, 160.0, lengths, seed, shape=0.1),
        ),
        Case(
            name="hot prefix",
            workload=make_hot_prefix(
                num_requests,
                250.0,
                Lengths(mean_prompt_tokens=300, mean_output_tokens=100),
                seed,
                num_prefixes=96,
                prefix_tokens=4096,
                skew=0.6,
            ),
            num_prefill=8,
            num_decode=12,
            num_warm_up=num_warm_up,
            cache_share=0.25,
            slo=Slo(ttft_s=0.5, tpot_s=0.05),
        ),
        Case(
            name="agent tree",
            workload=make_agent_tree(
                num_requests // 8,
                9.0,
                Lengths(mean_prompt_tokens=1500, mean_output_tokens=150),
                seed,
            ),
            num_prefill=4,
            num_decode=6,
            num_warm_up=num_warm_up,
            slo=Slo(ttft_s=0.5, tpot_s=0.03),
        ),
    ]


def _make_traced(trace: Path, num_requests: int, stretch: int | None) -> Case:
    whole = read_trace(trace)
    if stretch is None:
        sample = take_busiest(whole, num_requests)
    else:
        sample = take_stretch(whole, num_requests, stretch)
    return Case(
        name="mooncake conversation",
        workload=scale_rate(sample.workload, 7.0),
        num_prefill=12,
        num_decode=8,
        num_warm_up=sample.num_warm_up,
        slo=Slo(ttft_s=5.0, tpot_s=0.03),
    )


def run_case(case: Case, policy: str, profile: Profile) -> Report:
    """Simulates one workload under one policy."""
    profile = replace(profile, kv_tokens=round(profile.kv_tokens * case.cache_share))
    shape = ClusterShape(
        prefill=profile,
        decode=profile,
        num_prefill=case.num_prefill,
        num_decode=case.num_decode,
        tpot_slo_s=case.slo.tpot_s,
    )
    run = Cluster(shape, POLICIES[policy]).run(case.workload)
    begin_s = case.workload.arrivals[case.num_warm_up].at_s
    records = [one for one in run.records if one.at_s >= begin_s]
    return make_report(records, run, case.slo, shape.num_gpus)


def main() -> None:
    """Runs all and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="the Mooncake conversation trace")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--only", help="one workload")
    parser.add_argument("--policies", help="some policies, with commas between them")
    parser.add_argument("--rate", type=float, default=1.0, help="speeds all workloads up")
    parser.add_argument("--seed", type=int, default=SEED, help="of the workloads that are made up")
    parser.add_argument("--stretch", type=int, help="n-th part of the trace, not the busiest")
    parser.add_argument("--merge", type=Path, nargs="+", help="only puts files together")
    parser.add_argument("--output", type=Path, default=RESULTS / "routing.json")
    options = parser.parse_args()
    profile = replace(find_profile("h200", "llama-3-8b"), block_size=128)
    for part in options.merge or ():
        _write(options.output, _read(part), profile.worker_class)
    if options.merge:
        return
    rows = []
    for case in make_cases(options.trace, options.requests, options.seed, options.stretch):
        if options.only not in (None, case.name):
            continue
        if options.rate != 1.0:
            case = replace(case, workload=scale_rate(case.workload, options.rate))
        for policy in options.policies.split(",") if options.policies else POLICIES:
            begin_s = time.process_time()
            report = run_case(case, policy, profile)
            print(_line(case, policy, report, time.process_time() - begin_s), flush=True)
            rows.append(
                {
                    "workload": case.name,
                    "policy": policy,
                    "rate": options.rate,
                    "seed": options.seed,
                    "stretch": options.stretch,
                    "requests": options.requests,
                    "num_prefill": case.num_prefill,
                    "num_decode": case.num_decode,
                    "slo": asdict(case.slo),
                    **asdict(report),
                }
            )
    _write(options.output, rows, profile.worker_class)


def _write(path: Path, rows: list[dict[str, object]], profile: str) -> None:
    """Writes rows into a file; those of other workloads, policies, rates and seeds stay."""
    known = _read(path) if path.exists() else []
    fresh = {_name(row) for row in rows}
    kept = [row for row in known if _name(row) not in fresh]
    result = {"benchmark": "routing", "profile": profile, "rows": [*kept, *rows]}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _name(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row.get(one) for one in ("workload", "policy", "rate", "seed", "stretch"))


def _line(case: Case, policy: str, report: Report, took_s: float) -> str:
    return (
        f"{case.name:22} {policy:13} goodput {report.goodput_per_s:7.2f} of "
        f"{report.offered_per_s:7.2f}/s  TTFT mean {report.ttft.mean_s or 0:6.3f} p99 "
        f"{report.ttft.p99_s or 0:7.3f}  TPOT p99 {1000 * (report.tpot.p99_s or 0):6.1f} ms  "
        f"hits {report.hit_rate:4.0%}  imbalance {report.prefill_imbalance:.2f} "
        f"{report.decode_imbalance:.2f}  {took_s:.0f} s"
    )


if __name__ == "__main__":
    main()
