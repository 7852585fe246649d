"""Tunings of decode attention inside of whole steps: `python -m benchmarks.gpu_tuning`.

A kernel alone has the memory to itself. In a step, the weights of the next product are on their way
while it drains, and it finds the second-level cache full of them.
"""

import argparse
import json
from pathlib import Path

from benchmarks.gpu_engine import Bench
from benchmarks.gpu_harness import time_decode
from benchmarks.report import RESULTS
from pdserve.cuda.runner import CudaRunner
from pdserve.cuda.step_shape import decode_shape
from pdserve.kernels.decode_attention import DecodeTuning
from pdserve.kernels.streamed_attention import StreamTuning

SHAPES = (
    (1, 512),
    (1, 32768),
    (8, 512),
    (32, 512),
    (64, 512),
    (128, 512),
    (256, 512),
    (64, 2048),
    (256, 2048),
)
TUNINGS: dict[str, DecodeTuning | StreamTuning] = {
    "paged 32 2 4 4": DecodeTuning(),
    "paged 64 4 4 2": DecodeTuning(tile_tokens=64, num_warps=4, num_stages=4, programs_per_sm=2),
    "stream 1": StreamTuning(programs_per_sm=1),
    "stream 2": StreamTuning(programs_per_sm=2),
}
"""Numbers: tile, warps, stages, programs a processor."""
NUM_TOKENS = 40


def main() -> None:
    """Measures each batch with each tuning and prints milliseconds of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_tuning.json")
    arguments = parser.parse_args()
    bench = Bench(deterministic=False)
    runner = bench.stand.runner
    assert isinstance(runner, CudaRunner)
    rows = []
    for batch in sorted({batch for batch, _ in SHAPES}):
        for name, tuning in TUNINGS.items():
            runner.model.attention.decode_tuning = tuning
            runner.capture([decode_shape(batch)])
            for size, prompt in SHAPES:
                if size != batch:
                    continue
                ms = time_decode(bench.stand, batch, prompt, NUM_TOKENS).median_ms
                rows.append({"batch": batch, "prompt": prompt, "tuning": name, "ms": ms})
                print(f"{batch:4d} x {prompt:<5d} {name:14s} {ms:8.3f} ms", flush=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
