"""Pipeline parallel on two GPUs: throughput of prefill and decode against one GPU.

    python -m benchmarks.gpu_pipeline [--json PATH]

Model and harness as in `gpu_engine`; a process a rank. Rates are of the middle of a run: the
pipeline is filled before, and drained behind.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.gpu_engine import LLAMA_3_8B, OUTPUT_TOKENS
from benchmarks.gpu_harness import Stand, make_prompt, make_request, time_prefill
from benchmarks.rank_group import start_ranks
from decode_worker.scheduler import DecodeScheduler
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.rank.backend import ReportPhase
from pdserve.timeline import MonotonicClock
from prefill_worker.scheduler import PrefillScheduler

WARM_STEPS = 12
STREAM_PROMPTS = 64
STREAM_PROMPT_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFigures:
    """What a replica of some stages does."""

    decode_128: float
    """Tokens a second at 128 sequences, prompt 512."""
    decode_256: float
    """At 2 x 128."""
    decode_1_ms: float
    """Milliseconds a token of a lone sequence."""
    prefill: float
    """Prompt tokens a second, of a stream of prompts of 2,048."""
    prefill_2048_ms: float
    """A lone prompt."""
    prefill_8192_ms: float
    """A lone prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTarget:
    """A row: a rate of two stages over that of one GPU."""

    bench: str
    must: float
    aim: float


TARGETS = (
    PipelineTarget(bench="prefill stream", must=1.75, aim=1.9),
    PipelineTarget(bench="decode 2 x 128", must=1.6, aim=1.85),
)


@contextmanager
def pipeline_stand(report: ReportPhase, num_stages: int) -> Iterator[Stand]:
    """Yields Llama-3-8B's shape on as many GPUs as there are stages."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_8B))
        engine = EngineConfig(
            model=folder,
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            pipeline_parallel=num_stages,
        )
        with start_ranks(engine, report) as stand:
            yield stand


def decode_rate(stand: Stand, batch: int, prompt: int, num_tokens: int = OUTPUT_TOKENS) -> float:
    """Returns tokens a second of a batch whose KV came over a hand-off."""
    numbers = random.Random(f"{batch} {prompt}")
    num_stages = stand.engine.pipeline_parallel
    scheduler = DecodeScheduler(
        replace(stand.engine, enable_prefix_caching=False),
        stand.num_blocks,
        "bench",
        MonotonicClock(),
        max_waiting=batch,
        max_local_prefill_tokens=None,
        lookahead=lookahead_of(stand.runner, num_stages),
    )
    for index in range(batch):
        request = make_request(
            f"r{index}", make_prompt(numbers, prompt, stand.vocab_size), num_tokens
        )
        scheduler.reserve(request)
        scheduler.start(request.request_id, 1, {0: numbers.randrange(stand.vocab_size)})
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    ends: list[tuple[float, int]] = []
    while (ended := pipeline.turn()) is not None:
        made = scheduler.complete_step(ended.plan, ended.result)
        ends.append((time.perf_counter(), len(made)))
    return _middle_rate(ends)


def prefill_rate(stand: Stand, prompt: int, count: int) -> float:
    """Returns prompt tokens a second of a stream of prompts."""
    numbers = random.Random(f"{prompt} {count}")
    scheduler = PrefillScheduler(
        replace(stand.engine, enable_prefix_caching=False),
        stand.num_blocks,
        "bench",
        MonotonicClock(),
        max_waiting=count,
        look_ahead=4,
        num_stages=stand.engine.pipeline_parallel,
    )
    for index in range(count):
        scheduler.submit(make_request(f"p{index}", make_prompt(numbers, prompt, 1000), 2))
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    ends: list[tuple[float, int]] = []
    while (ended := pipeline.turn()) is not None:
        for progress in scheduler.complete_step(ended.plan, ended.result):
            if progress.samples:
                scheduler.release(progress.request_id, 1)
        ends.append((time.perf_counter(), ended.plan.num_tokens))
    return _middle_rate(ends, warm_steps=3)


def _middle_rate(ends: list[tuple[float, int]], warm_steps: int = WARM_STEPS) -> float:
    first, last = warm_steps, len(ends) - 1 - warm_steps
    tokens = sum(count for _, count in ends[first + 1 : last + 1])
    return tokens / (ends[last][0] - ends[first][0])


def measure(stand: Stand) -> PipelineFigures:
    """Measures all figures, each warmed up once."""

    def best(rate: Callable[[], float]) -> float:
        rate()
        return statistics.median(rate() for _ in range(2))

    return PipelineFigures(
        decode_128=best(lambda: decode_rate(stand, 128, 512)),
        decode_256=best(lambda: decode_rate(stand, 256, 512)),
        decode_1_ms=1000 / best(lambda: decode_rate(stand, 1, 512)),
        prefill=best(lambda: prefill_rate(stand, STREAM_PROMPT_TOKENS, STREAM_PROMPTS)),
        prefill_2048_ms=time_prefill(stand, 1, 2048),
        prefill_8192_ms=time_prefill(stand, 1, 8192),
    )


def speed_ups(one: PipelineFigures, two: PipelineFigures) -> dict[str, float]:
    """Returns the rows' ratios."""
    return {
        "prefill stream": two.prefill / one.prefill,
        "decode 2 x 128": two.decode_256 / one.decode_128,
    }


def measure_apart(num_stages: int) -> PipelineFigures:
    """Measures in a process of its own: memory of the one before would be missed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        argv = [sys.executable, "-m", "benchmarks.gpu_pipeline", "--stages", str(num_stages)]
        subprocess.run([*argv, "--json", str(path)], check=True)
        return PipelineFigures(**json.loads(path.read_text()))


def _measure_here(num_stages: int) -> PipelineFigures:
    def report(name: str, seconds: float, detail: str) -> None:
        print(f"{name:16s} {seconds:7.2f} s  {detail}", flush=True)

    with pipeline_stand(report, num_stages) as stand:
        figures = measure(stand)
    for name, value in asdict(figures).items():
        print(f"{num_stages} stages: {name:16s} {value:10.2f}", flush=True)
    return figures


def main() -> int:
    """Measures one GPU, then two, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stages", type=int, help="measure these alone, in this process")
    arguments = parser.parse_args()
    if arguments.stages:
        figures = _measure_here(arguments.stages)
        if arguments.json:
            arguments.json.write_text(json.dumps(asdict(figures)))
        return 0
    one, two = measure_apart(1), measure_apart(2)
    ratios = speed_ups(one, two)
    rows: list[dict[str, object]] = []
    for target in TARGETS:
        ratio = ratios[target.bench]
        rows.append({**asdict(target), "ratio": ratio, "holds": ratio >= target.must})
        print(
            f"{target.bench:16s} {ratio:5.2f} x  must {target.must:4.2f}  aim {target.aim:4.2f}  "
            f"{'ok' if ratio >= target.must else 'MISSED'}",
            flush=True,
        )
    if arguments.json:
        report = {"rows": rows, "one": asdict(one), "two": asdict(two)}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
