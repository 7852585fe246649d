"""What `pdserve plan` would have said of the loads of `four_gpus`: the same simulation."""

import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

from benchmarks.four_clusters import Pools, Row
from benchmarks.four_scale import Load, Scale
from benchmarks.serving_load import LoadPoint, make_gaps
from pdserve.predictor.profile import Profile, profile_from_json
from simulation.cluster import Cluster
from simulation.profile_files import find_profile
from simulation.report import make_report
from simulation.shape import ClusterShape
from simulation.workload import Arrival, Piece, Workload, make_workload

MODEL = "llama-3-8b"
SHIPPED = "h200"
PROFILE_TIMEOUT_S = 400.0


def measure_profile(scale: Scale, folder: Path, link_bytes_per_s: float | None) -> Profile:
    """Runs `pdserve profile` on one device.

    Raises:
        RuntimeError: it failed.
    """
    path, engine = folder / "profile.json", scale.engine
    command = [sys.executable, "-m", "launcher.cli", "profile", str(folder)]
    command += ["--output", str(path), "--name", MODEL, "--device", engine.device]
    command += ["--load-format", "dummy", "--max-num-seqs", str(engine.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if engine.kv_cache_memory_bytes is not None:
        command += ["--kv-cache-memory", str(engine.kv_cache_memory_bytes)]
    if link_bytes_per_s is not None:
        command += ["--link-bytes-per-s", str(link_bytes_per_s)]
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PROFILE_TIMEOUT_S
    )
    if child.returncode:
        raise RuntimeError(f"pdserve profile: {child.stderr[-1000:]}")
    return profile_from_json(path.read_text())


def known_profile(parts: dict[str, object]) -> tuple[Profile, str]:
    """Returns the profile of an earlier part of the run, or the one that comes with the project."""
    part = parts.get("profile")
    if isinstance(part, dict):
        return profile_from_json(json.dumps(part["rows"][0]["profile"])), "measured in this run"
    return find_profile(SHIPPED, MODEL), "shipped"


def predict(
    profile: Profile, pools: Pools, load: Load, point: LoadPoint, measured_per_s: float
) -> Row:
    """Simulates the arrivals that were sent, and compares goodput."""
    shape = ClusterShape(
        prefill=profile,
        decode=profile,
        num_prefill=pools.num_prefill,
        num_decode=pools.num_decode,
    )
    run = Cluster(shape).run(workload_of(point))
    report = make_report(run.records, run, load.slo, shape.num_gpus)
    guess = report.goodput_per_s
    error = guess / measured_per_s - 1 if measured_per_s else None
    shown = "-" if error is None else f"{error:+.1%}"
    print(f"  predicted goodput {guess:.2f}, {shown}", flush=True)
    return {
        "predicted_goodput_per_s": guess,
        "goodput_error": error,
        "predicted_ttft_p50_s": report.ttft.p50_s,
        "predicted_ttft_p99_s": report.ttft.p99_s,
        "predicted_tpot_p50_s": report.tpot.p50_s,
        "predicted_tpot_p99_s": report.tpot.p99_s,
    }


def workload_of(point: LoadPoint) -> Workload:
    """Returns the requests of a load point as the simulator takes them: nothing is shared."""
    gaps = zip(range(point.num_requests), make_gaps(point), strict=False)
    times = accumulate(gap for _, gap in gaps)
    return make_workload(
        "load point",
        [
            Arrival(
                at_s=at_s,
                pieces=(Piece(number, point.prompt_tokens),),
                num_output_tokens=point.output_tokens,
            )
            for number, at_s in enumerate(times)
        ],
    )
