"""Our engine against transformers `generate`: one process, one thread, the same dtype.

`python -m benchmarks.engine_cpu [float32] [bfloat16]`. Runs of both sides alternate, because a
machine of this kind drifts by up to 2 times; a ratio above 1 means that ours is faster.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Row, show, write
from decode_worker.scheduler import DecodeScheduler
from launcher.model_source import resolve_model
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import Dtype, EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from pdserve.request import Request, RequestId, SamplingParams
from pdserve.timeline import MonotonicClock

MODEL = "smollm2-135m"
SEED = 20
NUM_RUNS = 3
CONTEXT_TOKENS = 128
DECODE_STEPS = 24
STATIC_BATCH = 8
KV_TOKENS = 32_768
BOUNDS: dict[str, dict[str, float]] = {
    "bfloat16": {"prefill": 1.1, "decode1": 1.2, "decode8": 1.5, "mixed": 1.8},
    "float32": {"prefill": 1.05, "decode1": 0.95, "decode8": 1.2},
}
WORKLOAD = (
    f"SmolLM2-135M, greedy, no stop; prefill of 512 tokens; decode of {DECODE_STEPS} steps behind "
    f"{CONTEXT_TOKENS} tokens; 32 mixed requests (prompts 20-400, outputs 8-96, seed {SEED}) with "
    f"continuous batching against static batches of {STATIC_BATCH} in order of arrival, padded on "
    "the left and run to their longest output. One process, one thread, runs alternate. The row's "
    "value is the median over pairs of theirs / ours"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A prompt and how many tokens to make."""

    prompt: tuple[int, ...]
    num_tokens: int


class OurEngine:
    """The decode worker's scheduler and runner, without the processes around them."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        self._config = EngineConfig(
            model=str(folder), dtype=dtype, max_num_seqs=32, enable_prefix_caching=False
        )
        model_config = read_model_config(folder)
        geometry = geometry_of(model_config, self._config)
        self._num_blocks = KV_TOKENS // geometry.block_size
        kv = KvTensors(geometry, self._num_blocks)
        self._runner = ModelRunner(load_model(folder, self._config), kv)
        self._runner.warm_up()

    def run(self, jobs: Sequence[Job], *, skip_prompts: bool = False) -> float:
        """Returns seconds for all jobs, or for what follows everybody's first token."""
        scheduler = DecodeScheduler(
            self._config,
            self._num_blocks,
            "bench",
            MonotonicClock(),
            max_waiting=len(jobs),
            max_local_prefill_tokens=None,
        )
        for number, job in enumerate(jobs):
            scheduler.submit_local(_request(number, job))
        started: set[RequestId] = set()
        begin_s = time.perf_counter()
        while scheduler.has_work:
            plan = scheduler.plan_step()
            assert plan is not None
            progress = scheduler.complete_step(plan, self._runner.run(plan))
            if skip_prompts and len(started) < len(jobs):
                started.update(one.request_id for one in progress)
                begin_s = time.perf_counter()
        return time.perf_counter() - begin_s


def _request(number: int, job: Job) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        token_ids=job.prompt,
        num_prompt_tokens=len(job.prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=job.num_tokens, ignore_eos=True),
    )


class Transformers:
    """transformers' own generate."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype).eval()

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job], *, skip_prompts: bool = False) -> float:
        """Returns seconds for one static batch; without prompts, by a run that makes one token."""
        longest = max(len(job.prompt) for job in jobs)
        ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        whole_s = self._generate(ids, mask, max(job.num_tokens for job in jobs))
        return whole_s - self._generate(ids, mask, 1) if skip_prompts else whole_s

    def run_static(self, jobs: Sequence[Job], batch: int) -> float:
        """Returns seconds for all jobs, in static batches of a size."""
        return sum(self.run(jobs[start : start + batch]) for start in range(0, len(jobs), batch))

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> float:
        begin_s = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - begin_s


def make_jobs(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Job]:
    """Draws jobs; the same ones each time."""
    numbers = random.Random(SEED)
    return [
        Job(
            prompt=tuple(numbers.randrange(100, 49_000) for _ in range(numbers.randint(*prompt))),
            num_tokens=numbers.randint(*output),
        )
        for _ in range(count)
    ]


def compare(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    bound: float | None,
    has_warm_up: bool = True,
) -> Row:
    """Alternates both sides and returns the median ratio."""
    if has_warm_up:
        ours()
        theirs()
    pairs = []
    for number in range(NUM_RUNS):
        # Who goes first changes, so that a steady drift cancels.
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        one, two = first(), second()
        pairs.append((one, two) if number % 2 else (two, one))
    row = Row(
        name=name,
        value=statistics.median(their_s / our_s for our_s, their_s in pairs),
        unit="x",
        bound=bound,
        better="higher",
        details={
            "ours_s": [round(our_s, 4) for our_s, _ in pairs],
            "transformers_s": [round(their_s, 4) for _, their_s in pairs],
        },
    )
    show(row)
    return row


def measure(folder: Path, dtype: Dtype) -> list[Row]:
    """Measures one dtype."""
    bounds = BOUNDS[dtype]
    engine, peer = OurEngine(folder, dtype), Transformers(folder, dtype)
    prompt = make_jobs(1, (512, 512), (1, 1))
    rows = [
        compare(
            f"{dtype}: prefill of 512 tokens",
            lambda: engine.run(prompt),
            lambda: peer.run(prompt),
            bound=bounds["prefill"],
        )
    ]
    for batch in (1, 8):
        length = (CONTEXT_TOKENS, CONTEXT_TOKENS)
        jobs = make_jobs(batch, length, (DECODE_STEPS + 1, DECODE_STEPS + 1))
        row = compare(
            f"{dtype}: decode, batch {batch}",
            lambda jobs=jobs: engine.run(jobs, skip_prompts=True),  # type: ignore[misc]
            lambda jobs=jobs: peer.run(jobs, skip_prompts=True),  # type: ignore[misc]
            bound=bounds[f"decode{batch}"],
        )
        ours_s = row.details["ours_s"]
        assert isinstance(ours_s, list)
        row.details["ours_ms_per_step"] = round(1e3 * statistics.median(ours_s) / DECODE_STEPS, 2)
        rows.append(row)
    mixed = make_jobs(32, (20, 400), (8, 96))
    rows.append(
        compare(
            f"{dtype}: 32 mixed requests",
            lambda: engine.run(mixed),
            lambda: peer.run_static(mixed, STATIC_BATCH),
            bound=bounds.get("mixed"),
            has_warm_up=False,
        )
    )
    return rows


def main() -> None:
    """Measures the dtypes named on the command line, or both."""
    torch.set_num_threads(1)
    folder = resolve_model(MODEL)
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    names = [dtype for dtype in dtypes if dtype in sys.argv[1:]] or list(dtypes)
    rows: list[Row] = []
    for dtype in names:
        rows += measure(folder, dtype)
    write("engine_cpu" if len(names) == 2 else f"engine_cpu-{names[0]}", WORKLOAD, rows)


if __name__ == "__main__":
    main()
