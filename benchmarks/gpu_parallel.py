"""Tensor and pipeline parallel on two GPUs, without the processes around the engine.

`python -m benchmarks.gpu_parallel [--parts tp,pp,one] [--out FILE]`; needs two GPUs, under 8
minutes in all. Rows of parts that are left out are those of the run before, with its date.

Llama-3-8B's shape, random bfloat16 weights; a process a rank, requests through the real schedulers,
the engine's pipeline and the runners. Pipeline throughput is compared with one GPU in the same run:
a stream of prompts of 2048 tokens, one a step, and decoding of 128 sequences (prompt 512) against
twice as many on two stages.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.gpu_harness import Stand, make_prompt, make_request
from benchmarks.gpu_tensor import TARGETS, measure_rows
from benchmarks.rank_group import start_ranks
from benchmarks.report import RESULTS, write_gpu
from benchmarks.shapes import LLAMA_3_8B
from decode_worker.scheduler import DecodeScheduler
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.timeline import MonotonicClock
from prefill_worker.scheduler import PrefillScheduler

PARTS = {"one": (1, 1), "tp": (2, 1), "pp": (1, 2)}
"""Tensor ranks and stages."""
STREAM_PROMPTS, STREAM_TOKENS = 24, 2048
DECODE_BATCH, DECODE_PROMPT, DECODE_TOKENS = 128, 512, 96
WARM_TOKENS = 8
NUM_RUNS = 5
"""Medians are of so many, behind one that warms up."""
Row = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What two stages must make of one GPU's throughput."""

    bench: str
    must: float
    aim: float


PROMISES = (
    Promise(bench="prefill stream", must=1.75, aim=1.9),
    Promise(bench="decode", must=1.6, aim=1.85),
)


def prefill_rates(stand: Stand, num_prompts: int, prompt: int) -> list[float]:
    """Returns the prompt tokens per second of prompts that are all there from the start."""
    numbers = random.Random(f"{num_prompts} {prompt}")
    engine = replace(stand.engine, max_num_batched_tokens=prompt, enable_prefix_caching=False)
    rates = []
    for run in range(1 + NUM_RUNS):
        scheduler = PrefillScheduler(
            engine,
            stand.num_blocks,
            "bench",
            MonotonicClock(),
            max_waiting=num_prompts,
            look_ahead=4,
        )
        for index in range(num_prompts):
            ids = make_prompt(numbers, prompt, stand.vocab_size)
            scheduler.submit(make_request(f"{run}-{index}", ids, 2))
        pipeline = StepPipeline(stand.runner, scheduler.plan_step)
        begin_s = time.perf_counter()
        while (ended := pipeline.turn()) is not None:
            for progress in scheduler.complete_step(ended.plan, ended.result):
                if progress.samples:
                    scheduler.release(progress.request_id, 1)
        rates.append(num_prompts * prompt / (time.perf_counter() - begin_s))
    return rates[1:]


def decode_rate(stand: Stand, batch: int, prompt: int, num_tokens: int) -> float:
    """Returns the tokens per second of sequences whose KV came over a hand-off."""
    numbers = random.Random(f"{batch} {prompt}")
    scheduler = DecodeScheduler(
        replace(stand.engine, enable_prefix_caching=False),
        stand.num_blocks,
        "bench",
        MonotonicClock(),
        max_waiting=batch,
        max_local_prefill_tokens=None,
        lookahead=lookahead_of(stand.runner, stand.engine.pipeline_parallel),
    )
    for index in range(batch):
        ids = make_prompt(numbers, prompt, stand.vocab_size)
        request = make_request(f"r{index}", ids, num_tokens + 1)
        scheduler.reserve(request)
        scheduler.start(request.request_id, 1, {0: numbers.randrange(stand.vocab_size)})
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    num_made = 0
    made_at: list[tuple[float, int]] = []
    while (ended := pipeline.turn()) is not None:
        num_made += len(scheduler.complete_step(ended.plan, ended.result))
        made_at.append((time.perf_counter(), num_made))
    warm, cool = WARM_TOKENS * batch, (num_tokens - WARM_TOKENS) * batch
    inside = [one for one in made_at if warm <= one[1] <= cool]
    (begin_s, first), (end_s, last) = inside[0], inside[-1]
    return (last - first) / (end_s - begin_s)


def measure_part(part: str) -> list[Row]:
    """Loads one shape on the GPUs that this process sees and measures its rows."""
    tensor, stages = PARTS[part]
    rows: list[Row] = []

    def report(name: str, seconds: float, detail: str) -> None:
        rows.append({"bench": f"{part} start", "phase": name, "s": seconds, "detail": detail})
        print(f"{part} {name:16s} {seconds:7.2f} s  {detail}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(LLAMA_3_8B))
        engine = EngineConfig(
            model=scratch,
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            tensor_parallel=tensor,
            pipeline_parallel=stages,
        )
        with start_ranks(engine, report) as stand:
            rows += _tensor_rows(stand) if part == "tp" else _rate_rows(stand, part)
    return rows


def _tensor_rows(stand: Stand) -> list[Row]:
    rows: list[Row] = []
    for figure in measure_rows(stand, TARGETS):
        rows.append(figure.row | {"bench": f"TP=2 {figure.target.bench}"})
        print(f"TP=2 {figure}", flush=True)
    return rows


def _rate_rows(stand: Stand, part: str) -> list[Row]:
    batch = DECODE_BATCH * stand.engine.pipeline_parallel
    decode_rate(stand, batch, DECODE_PROMPT, 4 * WARM_TOKENS)
    rates = {
        "prefill stream": prefill_rates(stand, STREAM_PROMPTS, STREAM_TOKENS),
        "decode": [
            decode_rate(stand, batch, DECODE_PROMPT, DECODE_TOKENS) for _ in range(NUM_RUNS)
        ],
    }
    rows: list[Row] = []
    for name, runs in rates.items():
        rate, spread = statistics.median(runs), (min(runs), max(runs))
        rows.append({"bench": f"{part} {name}", "tokens_per_s": rate, "batch": batch})
        rows[-1] |= {"spread_tokens_per_s": spread, "runs": len(runs)}
        print(f"{part} {name:16s} {rate:10.0f} tokens/s ({spread[0]:.0f}-{spread[1]:.0f})")
    return rows


def compare_stages(rows: list[Row]) -> list[Row]:
    """Returns the rows that hold two stages against one GPU; none where one was not measured."""
    rates = {str(row["bench"]): row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    found: list[Row] = []
    for promise in PROMISES:
        alone, staged = rates.get(f"one {promise.bench}"), rates.get(f"pp {promise.bench}")
        if isinstance(alone, float) and isinstance(staged, float):
            ratio = staged / alone
            holds, reaches_aim = ratio >= promise.must, ratio >= promise.aim
            row: Row = {"value": ratio, "holds": holds, "reaches_aim": reaches_aim}
            found.append(asdict(promise) | row | {"bench": f"PP=2 {promise.bench} / one GPU"})
            print(f"PP=2 {promise.bench}: {ratio:.2f} x, must {promise.must} aim {promise.aim}")
    return found


def mark_rows(rows: list[Row], part: str) -> list[Row]:
    """Says in each row of which part it is and when that was measured."""
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return [{"part": part, "date": date} | row for row in rows]


def rows_of_others(path: Path, parts: Collection[str]) -> list[Row]:
    """Returns the rows of an earlier run whose parts are not measured now.

    Stages and the one GPU that they are held against go together.
    """
    if not path.exists():
        return []
    replaced = {*parts, *(("one", "pp") if {"one", "pp"} & set(parts) else ())}
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return [row for row in rows if row.get("part") not in replaced]


def main() -> int:
    """Measures each part in a process of its own, so that the next finds the GPUs empty."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", choices=PARTS, help="measure this part here")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_parallel.json")
    arguments = parser.parse_args()
    if arguments.only:
        arguments.out.write_text(json.dumps(measure_part(arguments.only)))
        return 0
    started_s = time.perf_counter()
    parts = arguments.parts.split(",")
    kept = rows_of_others(RESULTS / "gpu_parallel.json", parts)
    rows: list[Row] = []
    failed: list[str] = []

    def save() -> None:
        found = [*rows, *kept]
        write_gpu("gpu_parallel", arguments.out, __doc__, started_s, failed=failed, rows=found)

    for part in parts:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "rows.json"
            command = (sys.executable, "-m", "benchmarks.gpu_parallel", "--only", part)
            status = subprocess.run((*command, "--out", str(path)), check=False).returncode
            if status:
                failed.append(part)
                print(f"FAILED {part}: status {status}", flush=True)
            else:
                rows += mark_rows(json.loads(path.read_text()), part)
                save()
    rows += mark_rows(compare_stages(rows), "pp")
    save()
    print(f"written: {arguments.out}, {time.perf_counter() - started_s:.0f} s in all")
    return 1 if failed or any(row.get("holds") is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
