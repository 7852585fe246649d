"""Four GPUs: unlike pools, ratios of pools against their prediction, four ranks, a killed worker.

`python -m benchmarks.four_gpus PART... [--trial] [--out FILE]`; each part takes under 9 minutes and
replaces its own rows in the file. `--trial` runs a tiny model on a CPU: every part, few requests.
Without parts, all that this machine has GPUs for are run.

Llama-3-8B's shape, random bfloat16 weights, whole clusters over HTTP, prompts that nobody has
cached, Poisson arrivals; goodput counts requests that kept both objectives. Tokens are compared in
float32 and deterministic mode. Ranks of one replica are measured without faces, like one GPU.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.four_clusters import (
    Pools,
    PoolStand,
    Row,
    kill_figures,
    make_point,
    measure_load,
    running_pools,
    tokens_of,
)
from benchmarks.four_predictions import known_profile, measure_profile, predict
from benchmarks.four_scale import LLAMA_3_70B, ON_GPUS, TRIAL, Load, Scale
from benchmarks.gpu_harness import Stand, list_prefill_ms
from benchmarks.gpu_parallel import decode_rate
from benchmarks.rank_group import start_ranks
from benchmarks.report import RESULTS, gpu_names, versions
from pdserve.config.worker import FaultConfig

COLOCATED = Pools(num_prefill=0, num_decode=1)
UNLIKE = {
    "unlike-2P1D": Pools(num_prefill=2, num_decode=1, decode_tensor=2),
    "unlike-1P2D": Pools(num_prefill=1, num_decode=2, prefill_tensor=2),
}
RATIOS = tuple(Pools(num_prefill=prefill, num_decode=4 - prefill) for prefill in (3, 2, 1))
RANKS = {"ranks-1": (1, 1), "ranks-tp4": (4, 1), "ranks-tp2pp2": (2, 2)}
KILLED = Pools(num_prefill=2, num_decode=2)
PREFILL_RUNS = 5
LIMIT_S = 540.0
SLOW_STEP_S = 0.01
"""Added to decode steps of a trial, so that somebody is under way when the worker is killed."""
Part = Callable[[Scale, Path, dict[str, object]], list[Row]]


def run_profile(scale: Scale, folder: Path, parts: dict[str, object]) -> list[Row]:
    """Measures a profile of one GPU, for the predictions."""
    profile = measure_profile(scale, folder, None)
    print(f"laws: prefill {profile.prefill} decode {profile.decode}", flush=True)
    return [{"bench": "profile", "profile": json.loads(profile.to_json())}]


def run_unlike(pools: Pools) -> Part:
    """Returns the part that measures pools of unlike shapes, and compares their tokens."""

    def run(scale: Scale, folder: Path, parts: dict[str, object]) -> list[Row]:
        found = []
        for one in (COLOCATED, pools):
            with running_pools(scale, folder, one, scale.exact) as stand:
                found.append(tokens_of(stand, scale.exact_load, scale.num_exact, seed=3))
        same = sum(left == right for left, right in zip(*found, strict=True))
        is_whole = all(len(ids) == scale.exact_load.output_tokens for ids in found[0])
        rows: list[Row] = [{"bench": "TOK", "pools": str(pools), "requests": scale.num_exact}]
        rows[0] |= {"equal": same, "holds": is_whole and same == scale.num_exact}
        print(f"TOK {pools}: {same} of {scale.num_exact} as colocated", flush=True)
        load = scale.loads["2048"]
        with running_pools(scale, folder, pools, scale.engine) as stand:
            rows += [measure_load(stand, pools, load, rate) for rate in load.rates_per_s]
        return rows

    return run


def run_ratios(word: str) -> Part:
    """Returns the part that compares ratios of four GPUs at one length of prompts."""

    def run(scale: Scale, folder: Path, parts: dict[str, object]) -> list[Row]:
        load = scale.loads[word]
        profile, origin = known_profile(parts)
        rows: list[Row] = []
        for pools in RATIOS:
            with running_pools(scale, folder, pools, scale.engine) as stand:
                for rate in load.rates_per_s:
                    row = measure_load(stand, pools, load, rate)
                    count = max(4, round(rate * scale.seconds))
                    point = make_point(scale, load, rate, count, round(1000 * rate))
                    goodput = row["goodput_per_s"]
                    assert isinstance(goodput, float)
                    row |= {"profile": origin} | predict(profile, pools, load, point, goodput)
                    rows.append(row)
        return [*rows, *winners(rows, load)]

    return run


def winners(rows: Sequence[Row], load: Load) -> list[Row]:
    """Returns which ratio has the most goodput at its best rate, measured and predicted."""
    found: Row = {"bench": f"best ratio {load.name}"}
    for kind, name in (("measured", "goodput_per_s"), ("predicted", "predicted_goodput_per_s")):
        best = max(rows, key=lambda row: float(str(row[name])))
        found |= {kind: best["pools"], f"{kind}_per_s": best[name]}
    errors = [abs(float(str(row["goodput_error"]))) for row in rows if row["goodput_error"]]
    found["median_goodput_error"] = statistics.median(errors) if errors else None
    print(f"best ratio at {load.name}: {found['measured']}, predicted {found['predicted']}")
    return [found]


def run_ranks(shape: tuple[int, int], model: Mapping[str, object] | None = None) -> Part:
    """Returns the part that measures one replica of some ranks; another model's, if given."""

    def run(scale: Scale, folder: Path, parts: dict[str, object]) -> list[Row]:
        tensor, stages = shape
        if model is not None and scale.engine.device == "cuda":
            (folder / "config.json").write_text(json.dumps(model))
        engine = replace(
            scale.engine, model=str(folder), tensor_parallel=tensor, pipeline_parallel=stages
        )
        with start_ranks(engine, lambda name, seconds, detail: None) as stand:
            return list(rank_rows(stand, scale, f"TP{tensor} x PP{stages}"))

    return run


def rank_rows(stand: Stand, scale: Scale, name: str) -> list[Row]:
    """Measures decode batches and prompts."""
    rows: list[Row] = []
    for batch in scale.decode_batches:
        # As many sequences in each stage; a lone one goes through all of them.
        count = batch * stand.engine.pipeline_parallel if batch > 1 else 1
        if count > stand.engine.max_num_seqs * stand.engine.pipeline_parallel:
            continue
        rate = decode_rate(stand, count, scale.decode_prompt, scale.decode_tokens)
        rows.append({"bench": f"decode {batch}", "shape": name, "sequences": count})
        rows[-1] |= {"tokens_per_s": rate, "tpot_ms": 1e3 * count / rate}
        print(f"{name} decode {count}: {1e3 * count / rate:.3f} ms, {rate:.0f} tokens/s")
    for prompt in scale.prefill_prompts:
        times = list_prefill_ms(stand, 1, prompt, 0, PREFILL_RUNS)
        rows.append({"bench": f"prefill {prompt}", "shape": name, "ms": statistics.median(times)})
        rows[-1]["spread_ms"] = (min(times), max(times))
        print(f"{name} prefill {prompt}: {statistics.median(times):.2f} ms", flush=True)
    return rows


def run_kill(scale: Scale, folder: Path, parts: dict[str, object]) -> list[Row]:
    """Kills one of two decode workers under load: at speed, and where tokens are compared."""
    rows: list[Row] = []
    # The second rate is what two decode workers can do, and one cannot with ease.
    fast = replace(scale.loads["2048"], rates_per_s=scale.loads["2048"].rates_per_s[1:2])
    is_trial = scale.engine.device == "cpu"
    slow = FaultConfig(step_delay_s=SLOW_STEP_S) if is_trial else FaultConfig()
    kinds = (("at speed", scale.engine, fast), ("exact", scale.exact, scale.exact_load))
    for name, engine, load in kinds:
        with running_pools(scale, folder, KILLED, engine, decode_faults=slow) as stand:
            rate = load.rates_per_s[0]
            count = max(8, round(rate * scale.seconds))
            point = make_point(scale, load, rate, count, seed=5)
            expected = None
            if name == "exact":
                expected = [one.token_ids for one in stand.client.run(point).answered]
            killer = Killer(stand, "decode-1", 0.5 * count / rate)
            answered = stand.client.run(point).answered
            figures = kill_figures(answered, killer.join(), expected)
        row: Row = {"bench": f"kill -9 of one of two decode workers, {name}", "load": load.name}
        row |= {"offered_per_s": rate, **figures}
        row["holds"] = not figures["requests_lost"] and not figures["requests_with_wrong_tokens"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


class Killer:
    """Kills a worker, face and ranks, some time from now."""

    def __init__(self, stand: PoolStand, worker_id: str, delay_s: float) -> None:
        """Starts to wait."""
        self._stand = stand
        self._worker_id = worker_id
        self._killed_s: float | None = None
        self._timer = threading.Timer(delay_s, self._kill)
        self._timer.start()

    def join(self) -> float:
        """Returns when it was killed, on the monotonic clock."""
        self._timer.join()
        assert self._killed_s is not None, "the worker could not be killed"
        return self._killed_s

    def _kill(self) -> None:
        member = self._stand.cluster.member(self._worker_id)
        assert member.record is not None
        assert member.face_pid is not None
        for pid in (member.face_pid, *member.record.rank_pids):
            os.kill(pid, signal.SIGKILL)
        self._killed_s = time.monotonic()


PARTS: Mapping[str, tuple[Part, int]] = {
    "profile": (run_profile, 1),
    **{name: (run_unlike(pools), pools.num_gpus) for name, pools in UNLIKE.items()},
    **{f"ratios-{word}": (run_ratios(word), 4) for word in ON_GPUS.loads},
    **{name: (run_ranks(shape), shape[0] * shape[1]) for name, shape in RANKS.items()},
    "ranks-70b": (run_ranks((4, 1), LLAMA_3_70B), 4),
    "kill": (run_kill, KILLED.num_gpus),
}
"""What is run, and the GPUs that it takes."""


def against_one_gpu(parts: Mapping[str, object]) -> list[Row]:
    """Returns the rows of several ranks over those of one GPU, where both are there."""
    found: list[Row] = []
    alone = {row["bench"]: row for row in rows_of(parts, "ranks-1")}
    for name in ("ranks-tp4", "ranks-tp2pp2"):
        for row in rows_of(parts, name):
            if row["bench"] not in alone:
                continue
            one, kind = alone[row["bench"]], "tokens_per_s" if "tokens_per_s" in row else "ms"
            ours, theirs = float(str(row[kind])), float(str(one[kind]))
            gain = ours / theirs if kind == "tokens_per_s" else theirs / ours
            found.append({"bench": f"{row['shape']} {row['bench']} / one GPU", "gain": gain})
    return found


def rows_of(parts: Mapping[str, object], name: str) -> list[Row]:
    """Returns the rows of a part; none if it was not run."""
    part = parts.get(name)
    return list(part["rows"]) if isinstance(part, dict) else []


def run_here(name: str, scale: Scale, out: Path, known: Path) -> None:
    """Runs a part in this process."""
    parts = json.loads(known.read_text())["parts"] if known.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = scale.make_folder(Path(scratch) / "model")
        out.write_text(json.dumps(PARTS[name][0](scale, folder, parts)))


def run_part(name: str, path: Path, *, is_trial: bool) -> bool:
    """Runs a part in a process of its own and puts its rows into the file."""
    started_s = time.perf_counter()
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.four_gpus", name, "--here", str(rows)]
        command += ["--out", str(path), *(["--trial"] if is_trial else [])]
        try:
            status = subprocess.run(command, check=False, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            print(f"FAILED {name}: status {status}", flush=True)
            return False
        found = json.loads(rows.read_text())
    report = json.loads(path.read_text()) if path.exists() else {"benchmark": "four_gpus"}
    parts = report.setdefault("parts", {})
    parts[name] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": gpu_names() or "cpu, a trial",
        "versions": versions(),
        "seconds": time.perf_counter() - started_s,
        "rows": found,
    }
    report |= {"workload": (__doc__ or "").split("\n\n")[2], "ranks": against_one_gpu(parts)}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return all(row.get("holds") is not False for row in found)


def main() -> int:
    """Runs the parts that are asked for, as far as there are GPUs for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--trial", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--here", type=Path, help="run one part here, its rows go to this file")
    parser.add_argument("--out", type=Path, default=RESULTS / "four_gpus.json")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    scale = TRIAL if arguments.trial else ON_GPUS
    if arguments.here:
        (name,) = arguments.parts
        run_here(name, scale, arguments.here, arguments.out)
        return 0
    num_gpus = len(gpu_names())
    has_all = True
    for name in arguments.parts or PARTS:
        if not arguments.trial and PARTS[name][1] > num_gpus:
            print(f"{name} is left out: it takes {PARTS[name][1]} GPUs, here are {num_gpus}")
            has_all = False
            continue
        has_all &= run_part(name, arguments.out, is_trial=arguments.trial)
    return 0 if has_all else 1


if __name__ == "__main__":
    raise SystemExit(main())
