"""Sums over two GPUs, fused with residual and norm, against NCCL: right, and how long.

    python -m benchmarks.kernels.ranks [--json PATH]

A process a GPU. `us` is what one round adds to a CUDA graph of a chain of them; the floor is the
bytes that a rank sends at 390 GB/s, or 2 us. NCCL's figure is its all-reduce and the norm behind
it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from pdserve.cuda.device import Device
from pdserve.cuda.tensor_ranks import TensorRanks, connect_tensor_ranks
from pdserve.kernels.norm import add_norm
from pdserve.rank.exchange import RankExchange
from pdserve.rank.meeting import FolderMeeting

HIDDEN, VOCAB = 4096, 128256
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
EPSILON = 1e-5
NUM_RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the table."""

    kernel: str
    rows: int
    us: float
    floor_us: float
    error: float | None = None
    """Relative, in the norm, against float64."""


class Bench:
    """One rank's side."""

    def __init__(self, rank: int, folder: Path) -> None:
        """Meets the other one."""
        self.device = Device(torch.device("cuda"))
        meeting = FolderMeeting(folder)
        self.exchange = RankExchange(meeting.store("exchange", NUM_RANKS), rank, NUM_RANKS)
        self.rank = rank
        self.place = self.device.torch_device
        self.ranks: TensorRanks = connect_tensor_ranks(
            self.exchange, range(NUM_RANKS), 8192 * HIDDEN * 2, self.device
        )
        self._num_barriers = 0
        self.figures: list[Figure] = []
        store = meeting.store("nccl", NUM_RANKS)
        # Torch without CUDA has no such group.
        options = distributed.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=60)
        self.nccl = distributed.ProcessGroupNCCL(  # type: ignore[attr-defined]
            store, rank, NUM_RANKS, options
        )

    def barrier(self) -> None:
        """Waits for both hosts."""
        torch.cuda.synchronize()
        self._num_barriers += 1
        self.exchange.exchange(f"barrier {self._num_barriers}", b"x")

    def time_us(self, launch: Callable[[], None], chain: int) -> float:
        """Returns microseconds a launch."""
        launch()
        self.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(chain):
                launch()
        graph.replay()
        self.barrier()
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / chain)
        self.barrier()
        return statistics.median(times)

    def add(self, kernel: str, rows: int, us: float, sent: int, error: float | None = None) -> None:
        """Notes a figure."""
        floor_us = max(2.0, sent / 390e3)
        self.figures.append(Figure(kernel=kernel, rows=rows, us=us, floor_us=floor_us, error=error))
        if self.rank == 0:
            shown = "" if error is None else f"  error {error:.1e}"
            print(f"{kernel:34s} {rows:5d} {us:9.2f} us  {us / floor_us:5.2f} x{shown}", flush=True)

    def measure_sum(self, num_rows: int, num_splits: int, label: str) -> None:
        """Checks and times the fused sum."""
        numbers = torch.Generator(self.place).manual_seed(1000 * num_rows)
        dtype = torch.float32 if num_splits > 1 else torch.bfloat16
        parts = [
            torch.randn(num_splits, num_rows, HIDDEN, generator=numbers, device=self.place).to(
                dtype
            )
            for _ in range(NUM_RANKS)
        ]
        begin = torch.randn(num_rows, HIDDEN, generator=numbers, device=self.place).bfloat16()
        gain = torch.randn(HIDDEN, generator=numbers, device=self.place).bfloat16()
        residual, out = begin.clone(), torch.empty_like(begin)
        self.barrier()
        for _ in range(5):
            residual.copy_(begin)
            self.ranks.add_norm(parts[self.rank], residual, gain, out, epsilon=EPSILON)
        total = begin.double() + sum(part.double().sum(0) for part in parts)
        wanted = total * (total.square().mean(1, keepdim=True) + EPSILON).rsqrt() * gain.double()
        error = float((out.double() - wanted).norm() / wanted.norm())
        mine = parts[self.rank]
        self.barrier()
        us = self.time_us(
            lambda: self.ranks.add_norm(mine, residual, gain, out, epsilon=EPSILON),
            64 if num_rows <= 512 else 12,
        )
        self.add(f"{label}, {num_splits} parts", num_rows, us, num_rows * HIDDEN * 2, error)

    def measure_nccl(self, num_rows: int) -> None:
        """Times NCCL's all-reduce and the norm."""
        x = torch.zeros(1, num_rows, HIDDEN, device=self.place, dtype=torch.bfloat16)
        residual, gain, out = x[0].clone(), x[0, 0].clone(), x[0].clone()

        def launch() -> None:
            self.nccl.allreduce([x]).wait()
            add_norm(x, residual, gain, out, epsilon=EPSILON)

        us = self.time_us(launch, 64 if num_rows <= 512 else 12)
        self.add("NCCL + norm", num_rows, us, num_rows * HIDDEN * 2)

    def measure_gather(self, num_rows: int, width: int) -> None:
        """Checks and times a gather."""
        numbers = torch.Generator(self.place).manual_seed(num_rows)
        whole = torch.randn(num_rows, width, generator=numbers, device=self.place)
        half = width // 2
        mine = whole[:, self.rank * half : (self.rank + 1) * half].contiguous()
        out = torch.empty_like(whole)
        self.ranks.gather(mine, out)
        us = self.time_us(lambda: self.ranks.gather(mine, out), 12)
        error = float((out - whole).norm())
        self.add(f"gather of {width}", num_rows, us, num_rows * half * 4, error)

    def attempt(self, measure: Callable[[], None]) -> None:
        """One failure must not cost the other figures."""
        try:
            measure()
        except Exception:  # noqa: BLE001  shown
            print(f"rank {self.rank}: {traceback.format_exc()[-700:]}", flush=True)

    def run(self) -> None:
        """Measures everything."""
        for rows in ROWS:
            self.attempt(lambda n=rows: self.measure_sum(n, 1, "fused"))  # type: ignore[misc]
            if rows <= 256:
                self.attempt(lambda n=rows: self.measure_sum(n, 4, "fused"))  # type: ignore[misc]
        ring = self.ranks._ring
        for per_sm in (1, 4):
            self.ranks._ring = replace(ring, max_programs=per_sm * self.device.num_sms)
            for rows in (512, 2048, 8192):
                self.attempt(
                    lambda n=rows, k=per_sm: self.measure_sum(n, 1, f"fused, {k} an SM")  # type: ignore[misc]
                )
        self.ranks._ring = ring
        for rows in (1, 64, 256):
            self.attempt(lambda n=rows: self.measure_gather(n, VOCAB))  # type: ignore[misc]
            self.attempt(lambda n=rows: self.measure_gather(n, 512))  # type: ignore[misc]
        for rows in (1, 64, 256, 2048, 8192):
            self.attempt(lambda n=rows: self.measure_nccl(n))  # type: ignore[misc]
        self.ranks.watch().check()


def main() -> int:
    """Starts both ranks, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.rank is None:
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(NUM_RANKS):
                argv = [sys.executable, "-m", "benchmarks.kernels.ranks", "--rank", str(rank)]
                argv += [
                    "--folder",
                    folder,
                    *(["--json", str(arguments.json)] if arguments.json else []),
                ]
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
                children.append(subprocess.Popen(argv, env=environment))
            return max(child.wait() for child in children)
    bench = Bench(arguments.rank, arguments.folder)
    bench.run()
    if arguments.json and bench.rank == 0:
        rows = [asdict(figure) for figure in bench.figures]
        device = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1))
    bench.barrier()
    # The process group would wait for graphs that are gone.
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
