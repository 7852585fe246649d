"""The engine on one GPU: decode, prefill and prefix tables, idle time, profile, kernels alone.

`python -m benchmarks.gpu_engine [--parts decode,prefill,...] [--out FILE]`.

The model has the shape of Llama-3-8B, with random bfloat16 weights. Requests go through the real
schedulers, the engine's pipeline and the runner; only the processes around them are left out.
Floors and vLLM's figures were measured on the same kind of machine: one H200.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_harness import Stand, time_decode, time_prefill
from benchmarks.gpu_kernels import KernelTime, list_measurements
from benchmarks.gpu_profile import measure_gaps, profile_decode, profile_prefill
from benchmarks.report import RESULTS, versions
from benchmarks.shapes import LLAMA_3_8B
from pdserve.config.engine import EngineConfig
from pdserve.cuda.backend import CudaBackend
from pdserve.cuda.runner import CudaRunner
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.rank.backend import LoadJob
from pdserve.request import SamplingParams
from pdserve.timeline import MonotonicClock

WEIGHT_BYTES = 15.01e9
KV_BYTES_PER_TOKEN = 131_072
READ_BYTES_PER_S = 4.55e12
OUTPUT_TOKENS = 128
MUST_GAP_US = 30
PARTS = "decode,prefill,prefix,idle,profile,sampling,deterministic,kernels"
PROFILES = (
    ("decode", 1, 512, 0),
    ("decode", 64, 512, 0),
    ("decode", 128, 512, 0),
    ("decode", 256, 512, 0),
    ("prefill", 1, 512, 0),
    ("prefill", 1, 8192, 0),
    ("prefill", 1, 128, 4096),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One line of the tables: what vLLM 0.26.0 needs, the floor, and what is promised."""

    bench: str
    batch: int
    prompt: int
    vllm_ms: float
    must_ms: float
    floor_ms: float
    cached: int = 0


TARGETS = (
    Target(bench="decode", batch=1, prompt=512, vllm_ms=4.86, must_ms=4.3, floor_ms=3.32),
    Target(bench="decode", batch=8, prompt=512, vllm_ms=5.05, must_ms=4.4, floor_ms=3.43),
    Target(bench="decode", batch=32, prompt=512, vllm_ms=5.76, must_ms=5.2, floor_ms=3.83),
    Target(bench="decode", batch=64, prompt=512, vllm_ms=6.60, must_ms=5.9, floor_ms=4.36),
    Target(bench="decode", batch=128, prompt=512, vllm_ms=8.34, must_ms=7.5, floor_ms=5.42),
    Target(bench="decode", batch=256, prompt=512, vllm_ms=13.36, must_ms=12.2, floor_ms=9.2),
    Target(bench="decode", batch=64, prompt=2048, vllm_ms=9.39, must_ms=8.8, floor_ms=7.19),
    Target(bench="decode", batch=256, prompt=2048, vllm_ms=24.8, must_ms=24.3, floor_ms=20.6),
    Target(bench="prefill", batch=1, prompt=512, vllm_ms=16.7, must_ms=14, floor_ms=9.3),
    Target(bench="prefill", batch=1, prompt=2048, vllm_ms=51.4, must_ms=48, floor_ms=38.1),
    Target(bench="prefill", batch=1, prompt=8192, vllm_ms=215, must_ms=212, floor_ms=169),
    Target(bench="prefill", batch=1, prompt=32768, vllm_ms=1196, must_ms=1195, floor_ms=947),
    Target(bench="prefill", batch=32, prompt=2048, vllm_ms=1531, must_ms=1520, floor_ms=1218),
    Target(bench="prefix", batch=1, prompt=128, cached=4096, vllm_ms=15.1, must_ms=9, floor_ms=4.5),
)


class Bench:
    """One loaded engine, and the rows that were measured with it."""

    def __init__(self, *, deterministic: bool, mark_layers: int | None = None) -> None:
        """Loads; prints each phase. `mark_layers` as of `LoadJob`."""
        self.rows: list[dict[str, object]] = []
        self._label = "deterministic " if deterministic else ""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
        engine = EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            deterministic=deterministic,
        )
        config = read_model_config(folder)
        geometry = geometry_of(config, engine)
        job = LoadJob(
            folder=folder,
            engine=engine,
            model=config,
            geometry=geometry,
            part=geometry.parts[0],
            shard=None,
            max_model_len=config.max_position,
            mark_layers=mark_layers,
        )
        loaded = CudaBackend(cache=None).load(job, MonotonicClock(), self._report)
        runner = loaded.make_runner(None, None)
        assert isinstance(runner, CudaRunner)
        runner.warm_up()
        # Zeros would let the chip run cooler than it does at work.
        for layer in range(config.num_layers):
            for part in loaded.kv.layer(layer):
                part.normal_()
        torch.cuda.synchronize()
        # As a rank does once it is loaded.
        gc.collect()
        gc.freeze()
        self.stand = Stand(
            runner=runner,
            engine=engine,
            num_blocks=loaded.kv.num_blocks,
            vocab_size=config.vocab_size,
        )

    def _report(self, name: str, seconds: float, detail: str) -> None:
        print(f"{self._label}{name:16s} {seconds:7.2f} s  {detail}", flush=True)
        self.rows.append(
            {"bench": f"{self._label}start", "phase": name, "s": seconds, "detail": detail}
        )

    def measure(self, target: Target) -> None:
        """Measures one line and prints it."""
        row: dict[str, object] = asdict(target)
        if target.bench == "decode":
            times = time_decode(self.stand, target.batch, target.prompt, OUTPUT_TOKENS)
            ms = times.mean_ms
            kv_tokens = target.batch * (target.prompt + OUTPUT_TOKENS / 2)
            read_bytes = WEIGHT_BYTES + kv_tokens * KV_BYTES_PER_TOKEN
            row |= {"median_ms": times.median_ms, "max_ms": times.max_ms}
            row |= {"host_ms": times.host_ms}
            row |= {"read_tb_per_s": read_bytes / ms / 1e9}
        else:
            runs = 3 if target.batch * target.prompt > 16_384 else 15
            ms = time_prefill(self.stand, target.batch, target.prompt, target.cached, runs)
            row |= {"tflop_per_s": target.floor_ms * 780 / ms}
        row |= {"ms": ms, "of_floor": ms / target.floor_ms, "holds": ms < target.must_ms}
        row["bench"] = f"{self._label}{target.bench}"
        self.rows.append(row)
        cached = f"{target.cached}+" if target.cached else ""
        print(
            f"{row['bench']:8s} {target.batch:4d} x {cached}{target.prompt:<6d} {ms:9.3f} ms  "
            f"{ms / target.floor_ms:5.2f} x floor  vLLM {target.vllm_ms:7.2f}  "
            f"must {target.must_ms:7.2f}  {'ok' if ms < target.must_ms else 'MISSED'}",
            flush=True,
        )

    def measure_gaps(self, batch: int, prompt: int) -> None:
        """Measures how long the device waits between decode steps."""
        found = measure_gaps(self.stand, batch, prompt)
        row = {"bench": f"{self._label}idle", "batch": batch, "prompt": prompt, **asdict(found)}
        self.rows.append(row | {"must_us": MUST_GAP_US, "holds": found.median_us <= MUST_GAP_US})
        print(
            f"idle between steps, {batch} x {prompt}: median {found.median_us:.1f} us, "
            f"mean {found.mean_us:.1f}, longest {found.max_us:.0f}",
            flush=True,
        )

    def profile(self, bench: str, batch: int, prompt: int, cached: int = 0) -> None:
        """Shows where the time of a step goes."""
        if bench == "decode":
            found = profile_decode(self.stand, batch, prompt)
        else:
            found = profile_prefill(self.stand, batch, prompt, cached)
        row = {"bench": f"{self._label}profile {bench}", "batch": batch, "prompt": prompt}
        self.rows.append(row | {"cached": cached, **asdict(found)})
        print(
            f"profile {bench} {batch} x {cached}+{prompt}: {found.step_us:.0f} us a step, "
            f"{found.busy_us:.0f} busy"
        )
        for one in found.kernels[:9]:
            print(
                f"  adds {one.adds_us:9.1f} us ({one.us:9.1f} in all) {one.launches:6.1f} x "
                f"{one.name[:60]}",
                flush=True,
            )

    def measure_sampling(self, batch: int, prompt: int) -> None:
        """Measures decoding with random choice, plain and filtered."""
        for name, params in (
            ("random", SamplingParams(temperature=0.8, seed=1)),
            ("top-k, top-p", SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1)),
            ("top-p", SamplingParams(temperature=1.0, top_p=0.95, seed=1)),
        ):
            ms = time_decode(self.stand, batch, prompt, 48, params).mean_ms
            self.rows.append(
                {"bench": f"sampling {name}", "batch": batch, "prompt": prompt, "ms": ms}
            )
            print(f"sampling {name:14s} {batch:4d} x {prompt:<6d} {ms:9.3f} ms", flush=True)


def _measure_engine(parts: list[str], rows: list[dict[str, object]]) -> bool:
    """Measures the tables of an engine as it serves."""
    bench = Bench(deterministic=False)
    jobs: list[tuple[str, Callable[[], None]]] = [
        (str(target), partial(bench.measure, target)) for target in TARGETS if target.bench in parts
    ]
    for batch in (1, 64, 256) if "idle" in parts else ():
        jobs.append((f"idle {batch}", partial(bench.measure_gaps, batch, 512)))
    for work in PROFILES if "profile" in parts else ():
        jobs.append((f"profile {work}", partial(bench.profile, *work)))
    for batch in (1, 64, 256) if "sampling" in parts else ():
        jobs.append((f"sampling {batch}", partial(bench.measure_sampling, batch, 512)))
    verdicts = [_attempt(*job) for job in jobs]
    rows += bench.rows
    return all(verdicts)


def _measure_deterministic(rows: list[dict[str, object]]) -> bool:
    bench = Bench(deterministic=True)
    verdicts = [
        _attempt(str(target), partial(bench.measure, target))
        for target in TARGETS
        if target.prompt <= 2048 and target.batch in (1, 64) and not target.cached
    ]
    rows += bench.rows
    return all(verdicts)


def _measure_kernels(rows: list[dict[str, object]]) -> bool:
    all_hold = True
    for name, job in list_measurements():
        found: list[KernelTime] = []
        all_hold &= _attempt(name, lambda job=job, found=found: found.extend(job()))  # type: ignore[misc]
        for one in found:
            all_hold &= one.holds is not False
            rows.append({"bench": "kernel", **asdict(one), "of_floor": one.us / one.floor_us})
            print(
                f"{one.kernel:34s} {one.shape:>12s} {one.us:9.2f} us, floor {one.floor_us:9.2f}"
                f"{'  MISSED' if one.holds is False else ''}",
                flush=True,
            )
    return all_hold


def _free_device() -> None:
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def _attempt(name: str, measure: Callable[[], None]) -> bool:
    """Measures; one failure must not cost the other figures."""
    try:
        measure()
    except Exception as error:  # noqa: BLE001  shown, and the exit status tells
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        return False
    return True


def main() -> int:
    """Measures what is asked for and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_engine.json")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    started_s = time.perf_counter()
    all_hold = True
    rows: list[dict[str, object]] = []
    if set(parts) - {"deterministic", "kernels"}:
        all_hold &= _measure_engine(parts, rows)
        _free_device()
    if "deterministic" in parts:
        all_hold &= _measure_deterministic(rows)
        _free_device()
    if "kernels" in parts:
        all_hold &= _measure_kernels(rows)
    seconds = time.perf_counter() - started_s
    report = {
        "benchmark": "gpu_engine",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "seconds": seconds,
        "workload": f"{__doc__.split(chr(10) * 2)[2]} {OUTPUT_TOKENS} output tokens, ignore_eos.",
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {arguments.out}, {seconds:.0f} s in all")
    return 0 if all_hold else 1


if __name__ == "__main__":
    raise SystemExit(main())
