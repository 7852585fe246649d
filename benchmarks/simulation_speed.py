"""How long the simulator takes: `python -m benchmarks.simulation_speed [--workers N]`.

Half of the workers prefill, half decode; prompts of 2,000 and outputs of 200 tokens on average,
Poisson arrivals of one request a second and worker. One thread. Its processor time counts.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.report import RESULTS, machine, versions
from simulation.cluster import Cluster
from simulation.generators import Lengths, make_plain
from simulation.profile_files import find_profile
from simulation.record import Outcome
from simulation.shape import ClusterShape

MUST_S = 300.0
SEED = 8


def main() -> int:
    """Runs it and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=RESULTS / "simulation_speed.json")
    options = parser.parse_args()
    profile = replace(find_profile("h200", "llama-3-8b"), block_size=128)
    workload = make_plain(options.requests, options.workers, Lengths(), SEED)
    begin_s = time.process_time()
    shape = ClusterShape(
        prefill=profile,
        decode=profile,
        num_prefill=options.workers // 2,
        num_decode=options.workers - options.workers // 2,
    )
    run = Cluster(shape).run(workload)
    took_s = time.process_time() - begin_s
    num_tokens = workload.num_output_tokens
    report = {
        "benchmark": "simulation_speed",
        "machine": machine(),
        "versions": versions(),
        "workers": options.workers,
        "requests": options.requests,
        "done": sum(one.outcome is Outcome.DONE for one in run.records),
        "output_tokens": num_tokens,
        "events": run.num_events,
        "simulated_s": run.end_s,
        "cpu_s": took_s,
        "must_s": MUST_S,
        "holds": took_s <= MUST_S,
        "max_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: report[key] for key in ("cpu_s", "events", "done", "max_rss_gib")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
