"""Runs every kernel under compute-sanitizer and prints one line for each.

    python -m benchmarks.kernels.sanitize [--tool memcheck] [--kernel norm] [--json PATH]

memcheck looks for reads and writes outside of allocations, racecheck for hazards in shared memory.
Each kernel runs in a process of its own (`sanitize_calls`), without torch's cache of memory, whose
large allocations would hide a step over a tensor's end. A program that is known to be wrong in both
ways is run besides: a tool that finds nothing there finds nothing anywhere.

Triton tells the warps of a specialised kernel what to do in a word of shared memory, written before
and read behind a barrier of all of them (`barrier.sync 1` in the PTX). racecheck takes that for a
race. Such reports are counted apart: their accesses all lie on the line that names the kernel
or on the one that splits it, where no kernel of ours touches shared memory.

The exit status is 0 only if every kernel ran to its end, nothing was found in any, and the wrong
program was found out.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import triton

from benchmarks.kernels.sanitize_calls import CALLS
from pdserve.kernels import streamed_decode

TOOLS = ("memcheck", "racecheck")
NUM_PROCESSES = 10
TIMEOUT_S = 100.0
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
RACE = re.compile(r"Race reported between [^\n]*(?:\n=+ +and [^\n]*)*")
PLACE = re.compile(r"access at [^\n]* in (\S+:\d+)")
SWITCH = re.compile(r"def streamed_decode_kernel\(|    gl\.warp_specialize\(")
CONTROL = """
__global__ void wrong(int *out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x + 1] = shared[63 - threadIdx.x];
}
int main() {
  int *out;
  cudaMalloc(&out, 64 * sizeof(int));
  wrong<<<1, 64>>>(out);
  return cudaDeviceSynchronize() != cudaSuccess;
}
"""
"""Warps read what others write, without a barrier; the last thread writes behind the array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a tool said about one program."""

    name: str
    tool: str
    has_ended: bool
    """The program ran to its end; else nothing is known."""
    num_found: int | None
    """Errors or hazards; None if the tool did not say."""
    seconds: float
    output: str
    num_switches: int = 0
    """Of what was found, reports about Triton's word to its warps."""

    def describe(self) -> str:
        """Returns a few words."""
        found = "no summary" if self.num_found is None else f"{self.num_found} found"
        ended = "" if self.has_ended else ", did not end"
        switches = f", {self.num_switches} at Triton's switch" if self.num_switches else ""
        return f"{found}{switches}{ended} ({self.seconds:.0f} s)"

    @property
    def is_clean(self) -> bool:
        """Nothing was found, in all of the program."""
        return self.has_ended and self.num_found == self.num_switches


def count_found(output: str) -> int | None:
    """Returns the number in a tool's summary; None without one."""
    found = SUMMARY.search(output)
    return None if found is None else int(found[1] or found[2])


def find_switch_lines() -> frozenset[str]:
    """Returns where a specialised kernel's code is Triton's own, as a tool names it."""
    path = Path(streamed_decode.__file__)
    lines = enumerate(path.read_text().splitlines(), start=1)
    return frozenset(f"{path.name}:{number}" for number, line in lines if SWITCH.match(line))


def count_switches(output: str, switch_lines: frozenset[str]) -> int:
    """Returns how many races are reported of such lines alone."""
    races = (PLACE.findall(race) for race in RACE.findall(output))
    return sum(bool(places) and switch_lines.issuperset(places) for places in races)


def inspect(sanitizer: str, tool: str, name: str, program: list[str]) -> Verdict:
    """Runs a program under a tool."""
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only"]
    if tool == "memcheck":
        # So that a tensor's end is not another one's beginning.
        command += ["--padding", "256"]
    started_s = time.monotonic()
    try:
        run = subprocess.run(
            [*command, *program],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        output = run.stdout
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace") + "\ntimed out"
    verdict = Verdict(
        name=name,
        tool=tool,
        has_ended=f"{name}: done" in output,
        num_found=count_found(output),
        seconds=time.monotonic() - started_s,
        output=output,
        num_switches=count_switches(output, find_switch_lines()),
    )
    print(f"{tool} {name}: {verdict.describe()}", flush=True)
    return verdict


def build_control(folder: Path) -> list[str] | None:
    """Compiles the wrong program; None where there is no compiler."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return None
    source = folder / "wrong.cu"
    source.write_text(CONTROL)
    subprocess.run([nvcc, "-o", str(folder / "wrong"), str(source)], check=True)
    return [str(folder / "wrong")]


def to_json(verdicts: list[Verdict], controls: list[Verdict]) -> dict[str, object]:
    """Returns what was found, and the output of what is not clean."""

    def rows(found: list[Verdict]) -> list[dict[str, object]]:
        return [
            asdict(one) | {"output": "" if one.is_clean else one.output[-4000:]} for one in found
        ]

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": rows(verdicts),
        "wrong_program": rows(controls),
    }


def report(verdicts: list[Verdict], controls: list[Verdict]) -> bool:
    """Prints the table and what was found; returns whether all is as it must be."""
    for name in dict.fromkeys(one.name for one in verdicts):
        cells = [f"{one.tool} {one.describe()}" for one in verdicts if one.name == name]
        print(f"{name:18}", "; ".join(cells))
    for one in verdicts:
        if not one.is_clean:
            lines = [line for line in one.output.splitlines() if line.strip(" =")]
            print(f"\n{one.name}, {one.tool}:", *lines[:14], "...", *lines[-6:], sep="\n")
    is_clean = all(one.is_clean for one in verdicts)
    return is_clean and all(one.num_found for one in controls)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--kernel", choices=tuple(CALLS), action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        print("compute-sanitizer is not on the path")
        return 2
    tools = arguments.tool or TOOLS
    jobs = list(product(tools, arguments.kernel or tuple(CALLS)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_PROCESSES) as pool:
        running = [
            pool.submit(
                inspect,
                sanitizer,
                tool,
                name,
                [sys.executable, "-m", "benchmarks.kernels.sanitize_calls", name],
            )
            for tool, name in jobs
        ]
        wrong = build_control(Path(folder))
        controls = (
            [] if wrong is None else [inspect(sanitizer, tool, "wrong", wrong) for tool in tools]
        )
        verdicts = [future.result() for future in running]
    if wrong is None:
        print("no nvcc: whether the tools find anything was not tried")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(verdicts, controls), indent=1))
    return 0 if report(verdicts, controls) else 1


if __name__ == "__main__":
    sys.exit(main())
