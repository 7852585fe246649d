"""Decode attention on a GPU: checked against float64, then timed against the reading of KV.

`python -m benchmarks.kernels.decode [some|check|chain|time] [names of tunings]`. Of Llama-3-8B: 32
query heads, 8 KV heads of 128, bfloat16, blocks of 16 scattered at random; the floor is KV at
4.55 TB/s.

Time is that of a graph of many launches, over sets of KV that the second-level cache does not hold,
divided by their number; launches may overlap as they do in a decode step. `chain` is attention
behind attention. `rotated` has before each the kernel that stores the step's keys and values, as in
a step, and counts it in. `alone` lets nothing overlap.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.kernels.attention_checks import (
    LLAMA,
    RAGGED,
    Tuning,
    check_behind_rotation,
    check_decode,
    count_changed_by_repetition,
    make_queries,
    make_rotation,
    run_decode,
)
from benchmarks.kernels.paged import PagedKv, make_paged_kv, time_calls
from benchmarks.kernels.record import Record, show
from pdserve.kernels.decode_attention import DecodeTuning
from pdserve.kernels.decode_scratch import make_scratch
from pdserve.kernels.streamed_attention import StreamTuning

HEADS, KV_HEADS, HEAD_DIM = LLAMA
READ_BYTES_PER_US = 4.55e6
L2_BYTES = 60e6
Shape = tuple[int, int]
"""Sequences, tokens of each."""
SHAPES: list[Shape] = [
    (1, 16),
    (1, 512),
    (1, 2048),
    (1, 32768),
    (8, 512),
    (8, 8192),
    (32, 512),
    (64, 512),
    (64, 2048),
    (128, 512),
    (256, 512),
    (256, 2048),
]
TUNINGS: dict[str, Tuning] = {
    "paged-32": DecodeTuning(),
    "paged-64": DecodeTuning(tile_tokens=64, num_warps=4, num_stages=4, programs_per_sm=2),
    "stream-1": StreamTuning(programs_per_sm=1),
    "stream-2": StreamTuning(programs_per_sm=2),
    "stream-2-l8": StreamTuning(programs_per_sm=2, least_units=8),
}
"""Paged ones by their tile, streamed ones by programs a processor or least units of a share."""


class DecodeTimer:
    """Times decode attention over several sets of KV, so that none is in L2 when it is read."""

    def __init__(self, shape: Shape) -> None:
        batch, length = shape
        self.kv_bytes = 4 * batch * length * KV_HEADS * HEAD_DIM
        num_sets = max(2, min(40, int(2 * L2_BYTES / self.kv_bytes) + 1))
        self._q = make_queries(batch, LLAMA)
        sets = [make_paged_kv([length] * batch, KV_HEADS, HEAD_DIM) for _ in range(num_sets)]
        self._sets = [(kv, make_rotation(self._q, kv)) for kv in sets] * (1 if num_sets > 8 else 4)
        self._out = torch.empty_like(self._q)
        self._scratch = make_scratch(256, HEADS, HEAD_DIM, 32, "cuda")
        self.floor_us = self.kv_bytes / READ_BYTES_PER_US

    def time(self, tuning: Tuning | None, way: str) -> float:
        """Returns microseconds per launch; no tuning stands for the one that would be chosen."""

        def call(kv: PagedKv, rotate: Callable[[], None]) -> None:
            if way == "rotated":
                rotate()
            run_decode(self._q, kv, self._out, self._scratch, tuning=tuning, use_pdl=way != "alone")

        return time_calls([lambda one=one: call(*one) for one in self._sets])  # type: ignore[misc]


def make_decode_checks(name: str) -> dict[str, Callable[[], float]]:
    tuning = TUNINGS[name]
    some = (5, 700, 0, 2000)
    return {
        "ragged": lambda: check_decode(LLAMA, RAGGED, tuning=tuning),
        "64 ragged": lambda: check_decode(LLAMA, (100, 2000) * 32, tuning=tuning),
        "256 ragged": lambda: check_decode(LLAMA, (100, 7, 0, 331) * 64, tuning=tuning),
        "one long": lambda: check_decode(LLAMA, (32768,), tuning=tuning),
        "T=4 window": lambda: check_decode(LLAMA, some, queries=4, window=100, tuning=tuning),
        "cap D=64": lambda: check_decode((8, 8, 64), some, soft_cap=20.0, tuning=tuning),
        "T=3 D=64": lambda: check_decode((8, 4, 64), some, queries=3, tuning=tuning),
        "window": lambda: check_decode(LLAMA, some, window=333, tuning=tuning),
        "D=256": lambda: check_decode((16, 4, 256), some, queries=2, window=333, tuning=tuning),
        "block 32": lambda: check_decode(LLAMA, some, tuning=tuning, block_size=32),
        "block 128": lambda: check_decode(LLAMA, some, tuning=tuning, block_size=128),
        "rotated": lambda: check_behind_rotation(RAGGED, tuning=tuning),
    }


def check(record: Record, names: list[str]) -> None:
    """Compares with float64."""
    for name in names:
        jobs = make_decode_checks(name)
        # Most of this is compilation, which runs beside the others'; a capture bears no company.
        together = [key for key in jobs if key != "rotated"]
        with ThreadPoolExecutor(12) as pool:
            errors = list(pool.map(lambda key: record.run(name, key, jobs[key]), together))  # noqa: B023
        errors.append(record.run(name, "rotated", jobs["rotated"]))
        errors.append(record.run(name, "bits changed", lambda: count_changed(TUNINGS[name])))  # noqa: B023
        cells = zip([*together, "rotated", "bits changed"], errors, strict=True)
        print(f"{name}:", *(f"[{key} {show(error, 5)}]" for key, error in cells), flush=True)


def count_changed(tuning: Tuning) -> float:
    """Returns how many outputs have other bits in any of many launches; 0 is right."""
    batches = [(2048,) * 64, RAGGED * 7, (512,) * 8, (32768,), (40, 600) * 100]
    return sum(count_changed_by_repetition(lengths, tuning=tuning) for lengths in batches)


def tabulate(record: Record, names: list[str], ways: tuple[str, ...]) -> None:
    for shape in SHAPES:
        timer = DecodeTimer(shape)
        cells = []
        for name in names:
            for way in ways:
                us = record.run(
                    f"{shape[0]} x {shape[1]}",
                    f"{name} {way}",
                    lambda n=name, w=way: timer.time(TUNINGS[n], w),  # type: ignore[misc]  # noqa: B023
                )
                cells.append(f"{name} {way[0]} {show(us)};")
        print(f"{shape[0]} x {shape[1]} floor {timer.floor_us:.1f}:", *cells, flush=True)


def main() -> None:
    parts: dict[str, Callable[[Record, list[str]], None]] = {
        "some": lambda record, names: check_some(record, names),
        "check": check,
        "chain": lambda record, names: tabulate(record, names, ("chain",)),
        "time": lambda record, names: tabulate(record, names, ("chain", "rotated", "alone")),
    }
    torch.manual_seed(int(time.time()))
    record = Record()
    names = [name for name in sys.argv[1:] if name in TUNINGS] or list(TUNINGS)
    for part in [part for part in sys.argv[1:] if part in parts] or ["check", "time"]:
        started = time.perf_counter()
        record.run("parts", part, lambda part=part: parts[part](record, names))  # type: ignore[misc]
        print(f"({part}: {time.perf_counter() - started:.0f} s)", flush=True)
        record.write(f"decode-{names[0]}")


def check_some(record: Record, names: list[str]) -> None:
    """Runs each kernel over little data, for a memory checker to watch."""
    for name in names:
        jobs: dict[str, Callable[[], float]] = {
            "decode": lambda n=name: check_decode(LLAMA, (5, 70, 0, 300), tuning=TUNINGS[n]),  # type: ignore[misc]
            "T=3": lambda n=name: check_decode(  # type: ignore[misc]
                LLAMA, (5, 70), queries=3, window=20, tuning=TUNINGS[n]
            ),
        }
        print(name, *(f"[{key} {show(record.run('some', key, jobs[key]), 4)}]" for key in jobs))


if __name__ == "__main__":
    main()
