"""Tensor parallel on two GPUs: the decode and prefill rows of the table of parallelism.

    python -m benchmarks.gpu_tensor [--json PATH]

Model, harness and figures as in `gpu_engine`; a process a rank.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu_engine import OUTPUT_TOKENS
from benchmarks.gpu_harness import Stand, list_prefill_ms, time_decode
from benchmarks.gpu_profile import measure_gaps, profile_decode, profile_prefill
from benchmarks.rank_group import start_ranks
from benchmarks.shapes import LLAMA_3_8B
from pdserve.config.engine import EngineConfig
from pdserve.rank.backend import ReportPhase

WARM_TOKENS = 16
DECODE_RUNS = 5
PREFILL_RUNS = 11


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
    times_ms: tuple[float, ...]
    """Of each run."""

    @property
    def ms(self) -> float:
        """The median run."""
        return statistics.median(self.times_ms)

    @property
    def row(self) -> dict[str, object]:
        """As it is written down."""
        return asdict(self.target) | {
            "ms": self.ms,
            "spread_ms": (min(self.times_ms), max(self.times_ms)),
            "runs": len(self.times_ms),
            "holds": self.holds,
            "reaches_aim": self.ms <= self.target.aim_ms,
        }

    def __str__(self) -> str:
        """Says it in a line."""
        target, (least, most) = self.target, (min(self.times_ms), max(self.times_ms))
        return (
            f"{target.bench:8s} {target.batch:4d} x {target.prompt:<6d} {self.ms:8.3f} ms "
            f"({least:.2f}-{most:.2f})  must {target.must_ms:6.1f}  aim {target.aim_ms:6.1f}  "
            f"vLLM {target.vllm_ms:6.2f}  {'ok' if self.holds else 'MISSED'}"
        )

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
    """Measures rows one after another, each several times: a run alone may meet a busy host."""
    for target in targets:
        batch, prompt = target.batch, target.prompt
        if target.bench == "decode":
            time_decode(stand, batch, prompt, WARM_TOKENS)
            times = [
                time_decode(stand, batch, prompt, OUTPUT_TOKENS).mean_ms for _ in range(DECODE_RUNS)
            ]
        else:
            times = list_prefill_ms(stand, batch, prompt, 0, PREFILL_RUNS)
        yield TensorFigure(target=target, times_ms=tuple(times))


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
            print(figure, flush=True)
        if arguments.profile:
            show_profiles(stand)
    if arguments.json:
        rows = [one.row for one in figures]
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
