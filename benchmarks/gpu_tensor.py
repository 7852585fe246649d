"""Tensor parallel on two GPUs: the decode and prefill rows of the table of parallelism.

    python -m benchmarks.gpu_tensor [--json PATH]

Model, harness and figures as in `gpu_engine`; a process a rank.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu_engine import LLAMA_3_8B, OUTPUT_TOKENS
from benchmarks.gpu_harness import Stand, time_decode, time_prefill
from benchmarks.gpu_profile import measure_gaps, profile_decode, profile_prefill
from benchmarks.rank_group import start_ranks
from pdserve.config.engine import EngineConfig
from pdserve.rank.backend import ReportPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTarget:
    """A row: what vLLM 0.26.0 needs on the same machine, and what is promised."""

    bench: str
    batch: int
    prompt: int
    vllm_ms: float
    must_ms: float
    aim_ms: float


TARGETS = (
    TensorTarget(bench="decode", batch=1, prompt=512, vllm_ms=3.48, must_ms=3.0, aim_ms=2.4),
    TensorTarget(bench="decode", batch=64, prompt=512, vllm_ms=4.45, must_ms=4.1, aim_ms=3.3),
    TensorTarget(bench="decode", batch=256, prompt=512, vllm_ms=8.33, must_ms=7.6, aim_ms=6.2),
    TensorTarget(bench="prefill", batch=1, prompt=2048, vllm_ms=49.5, must_ms=32, aim_ms=28),
    TensorTarget(bench="prefill", batch=1, prompt=8192, vllm_ms=130, must_ms=124, aim_ms=112),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFigure:
    """A measured row."""

    target: TensorTarget
    ms: float

    @property
    def holds(self) -> bool:
        """Says whether the promise was kept."""
        return self.ms <= self.target.must_ms


@contextmanager
def tensor_stand(report: ReportPhase, *, deterministic: bool = False) -> Iterator[Stand]:
    """Yields Llama-3-8B's shape on two GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_8B))
        engine = EngineConfig(
            model=folder,
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            deterministic=deterministic,
            tensor_parallel=2,
        )
        with start_ranks(engine, report) as stand:
            yield stand


def measure_rows(stand: Stand, targets: Sequence[TensorTarget]) -> Iterator[TensorFigure]:
    """Measures rows one after another."""
    for target in targets:
        if target.bench == "decode":
            ms = time_decode(stand, target.batch, target.prompt, OUTPUT_TOKENS).mean_ms
        else:
            ms = time_prefill(stand, target.batch, target.prompt, 0, 7)
        yield TensorFigure(target=target, ms=ms)


def main() -> int:
    """Measures all rows, and shows where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()

    def report(name: str, seconds: float, detail: str) -> None:
        print(f"{name:16s} {seconds:7.2f} s  {detail}", flush=True)

    figures: list[TensorFigure] = []
    with tensor_stand(report) as stand:
        for figure in measure_rows(stand, TARGETS):
            figures.append(figure)
            target = figure.target
            print(
                f"{target.bench:8s} {target.batch:4d} x {target.prompt:<6d} {figure.ms:8.3f} ms  "
                f"must {target.must_ms:6.1f}  aim {target.aim_ms:6.1f}  "
                f"{'ok' if figure.holds else 'MISSED'}",
                flush=True,
            )
        if arguments.profile:
            show_profiles(stand)
    if arguments.json:
        rows = [{**asdict(one.target), "ms": one.ms, "holds": one.holds} for one in figures]
        device = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1))
    return 0 if all(figure.holds for figure in figures) else 1


def show_profiles(stand: Stand) -> None:
    """Prints kernels by their time, and the gaps between steps."""
    for batch in (1, 256):
        found = profile_decode(stand, batch, 512)
        print(f"profile decode {batch}: {found.step_us:.0f} us a step, {found.busy_us:.0f} busy")
        for name, us, count in found.kernels[:12]:
            print(f"  {us:9.1f} us {count:6.1f} x {name[:60]}", flush=True)
    for prompt in (8192,):
        found = profile_prefill(stand, 1, prompt, 0)
        print(f"profile prefill {prompt}: {found.step_us:.0f} us, {found.busy_us:.0f} busy")
        for name, us, count in found.kernels[:10]:
            print(f"  {us:9.1f} us {count:6.1f} x {name[:60]}", flush=True)
    for batch in (1, 256):
        gaps = measure_gaps(stand, batch, 512)
        print(f"idle between steps, {batch}: median {gaps.median_us:.1f} us", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
