"""Attention kernels on a GPU: checked against float64, then timed against their floors.

`python -m benchmarks.kernels.attention [check] [decode] [prefill] [dense] [shapes]`, all of them by
default; `some` is a short check for compute-sanitizer. 32 query heads, 8 KV heads of 128, bfloat16,
blocks of 16 scattered at random. Decode's floor is the reading of KV at 4.55 TB/s; prefill is given
in TFLOP/s of the causal half.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from benchmarks.kernels.attention_checks import (
    LLAMA,
    RAGGED,
    check_decode,
    check_prefill,
    make_checks,
    make_queries,
    run_decode,
)
from benchmarks.kernels.paged import BLOCK_SIZE, PagedKv, make_paged_kv, time_calls
from benchmarks.kernels.record import Record, show
from pdserve.kernels.decode_attention import DecodeTuning
from pdserve.kernels.decode_scratch import make_scratch
from pdserve.kernels.dense_attention import dense_attention
from pdserve.kernels.prefill_attention import PrefillTuning, prefill_attention
from pdserve.kernels.prefill_attention import make_scratch as make_prefill_scratch

HEADS, KV_HEADS, HEAD_DIM = LLAMA
READ_BYTES_PER_US = 4.55e6
L2_BYTES = 60e6
Shape = tuple[int, int]
"""Of decode: sequences, tokens of each. Of prefill: tokens before a chunk, tokens of it."""
DECODE_TUNINGS = [
    DecodeTuning(tile_tokens=tile, num_warps=warps, num_stages=stages, programs_per_sm=programs)
    for tile, warps, stages, programs in [
        (32, 2, 4, 4),
        (32, 2, 5, 3),
        (32, 2, 6, 2),
        (16, 1, 6, 4),
        (16, 1, 5, 5),
        (16, 2, 6, 4),
        (16, 2, 8, 3),
        (32, 1, 4, 4),
        (32, 4, 4, 4),
        (32, 4, 6, 2),
        (64, 2, 4, 2),
        (64, 4, 3, 3),
        (64, 4, 4, 2),
        (64, 4, 6, 1),
    ]
]
PREFILL_TUNINGS = [
    PrefillTuning(tile_queries=m, tile_tokens=n, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in [(128, 64, 8, 3), (64, 64, 4, 3)]
]
PREFILL_SHAPES: list[Shape] = [
    (0, 128),
    (0, 512),
    (0, 1024),
    (0, 2048),
    (0, 8192),
    (0, 32768),
    (1024, 128),
    (4096, 128),
    (4096, 512),
    (4096, 2048),
    (16384, 8192),
]


class DecodeTimer:
    """Times decode attention over several sets of KV, so that none is in L2 when it is read."""

    def __init__(self, shape: Shape) -> None:
        batch, length = shape
        kv_bytes = 4 * batch * length * KV_HEADS * HEAD_DIM
        num_sets = max(2, min(40, int(2 * L2_BYTES / kv_bytes) + 1))
        self._sets = [
            make_paged_kv([length] * batch, KV_HEADS, HEAD_DIM) for _ in range(num_sets)
        ] * (1 if num_sets > 8 else 4)
        self._q = make_queries(batch, LLAMA)
        self._out = torch.empty_like(self._q)
        self._scratch = make_scratch(256, HEADS, HEAD_DIM, 16, "cuda")
        self.floor_us = kv_bytes / READ_BYTES_PER_US

    def time(
        self, tuning: DecodeTuning, split_tokens: int | None = None, use_pdl: bool = True
    ) -> float:
        """Returns microseconds per launch."""

        def call(kv: PagedKv) -> None:
            run_decode(
                self._q,
                kv,
                self._out,
                self._scratch,
                tuning=tuning,
                split_tokens=split_tokens,
                use_pdl=use_pdl,
            )

        return time_calls([lambda kv=kv: call(kv) for kv in self._sets])  # type: ignore[misc]


def check_all(record: Record) -> None:
    jobs: dict[str, Callable[[], float]] = dict(make_checks())
    for number, decode_tuning in enumerate(DECODE_TUNINGS):
        jobs[f"decode tuning {number}"] = lambda chosen=decode_tuning: check_decode(  # type: ignore[misc]
            LLAMA, RAGGED, tuning=chosen
        )
        jobs[f"decode tuning {number}, 64"] = lambda chosen=decode_tuning: check_decode(  # type: ignore[misc]
            LLAMA, (100, 2000) * 32, tuning=chosen
        )
    for number, tuning in enumerate(PREFILL_TUNINGS):
        jobs[f"prefill tuning {number}"] = lambda chosen=tuning: check_prefill(  # type: ignore[misc]
            LLAMA, ((0, 2000), (513, 300)), tuning=chosen
        )
    # Most of this is compilation, which runs beside the others'.
    with ThreadPoolExecutor(12) as pool:
        errors = dict(
            zip(jobs, pool.map(lambda key: record.run("check", key, jobs[key]), jobs), strict=True)
        )
    print(
        "errors:", *(f"[{key} {error:.1e}]" for key, error in errors.items() if error is not None)
    )


def check_some(record: Record) -> None:
    """Runs each kernel once over little data, for a memory checker to watch."""
    jobs: dict[str, Callable[[], float]] = {
        "decode": lambda: check_decode(LLAMA, (5, 70, 0, 200)),
        "decode T=3": lambda: check_decode(LLAMA, (5, 70), queries=3, window=20, split_tokens=32),
        "prefill": lambda: check_prefill(LLAMA, ((0, 33), (77, 1), (64, 70))),
        "prefill splits": lambda: check_prefill(LLAMA, ((0, 33), (200, 70)), num_splits=2),
    }
    print("errors:", *(f"[{key} {show(record.run('some', key, jobs[key]), 4)}]" for key in jobs))


def tabulate_decode(record: Record) -> None:
    best: dict[int, float] = {}
    for shape in [(64, 2048), (1, 32768), (1, 512), (64, 512)]:
        timer = DecodeTimer(shape)
        cells = []
        for number, tuning in enumerate(DECODE_TUNINGS):
            us = record.run("decode", f"{shape} {number}", lambda t=tuning: timer.time(t))  # type: ignore[misc]  # noqa: B023
            cells.append(f"{number}:{show(us)}")
            ratio = 99.0 if us is None else us / (timer.floor_us + 4.0)
            best[number] = max(best.get(number, 0.0), ratio)
        print(f"decode {shape} floor {timer.floor_us:.1f} us:", *cells)
    order = sorted(best, key=lambda number: best[number])
    print("worst ratio to floor + 4 us:", *(f"{n}:{best[n]:.2f}" for n in order))
    for shape in [(1, 16), (1, 512), (1, 2048), (8, 512), (8, 8192), (256, 512), (256, 2048)]:
        timer = DecodeTimer(shape)
        cells = [
            show(record.run("decode", f"{shape} {n}", lambda n=n: timer.time(DECODE_TUNINGS[n])))  # type: ignore[misc]  # noqa: B023
            for n in order[:4]
        ]
        print(f"decode {shape} floor {timer.floor_us:.1f}; {order[:4]}:", *cells)
    tuning = DECODE_TUNINGS[order[0]]
    for shape in [(1, 512), (1, 32768), (64, 2048)]:
        timer = DecodeTimer(shape)
        trials: dict[str, Callable[[], float]] = {
            "no pdl": lambda t=timer: t.time(tuning, use_pdl=False),  # type: ignore[misc]
            "fixed 256": lambda t=timer: t.time(tuning, 256),  # type: ignore[misc]
            "fixed 512": lambda t=timer: t.time(tuning, 512),  # type: ignore[misc]
        }
        for least in (2, 4):
            trials[f"least {least}"] = lambda t=timer, least=least: t.time(  # type: ignore[misc]
                replace(tuning, least_tiles=least)
            )
        for ahead in (1,):
            trials[f"prefetch {ahead}"] = lambda t=timer, ahead=ahead: t.time(  # type: ignore[misc]
                replace(tuning, prefetched_tiles=ahead)
            )
        cells = [f"{k} {show(record.run('decode', f'{shape} {k}', j))}" for k, j in trials.items()]
        print(f"decode {shape} with {order[0]}:", *cells)


def prefill_flops(shape: Shape) -> float:
    context, queries = shape
    return 4.0 * HEADS * HEAD_DIM * (queries * context + queries * (queries + 1) / 2)


def time_prefill(shape: Shape, tuning: PrefillTuning | None, num_splits: int) -> float:
    context, queries = shape
    kv = make_paged_kv([context + queries], KV_HEADS, HEAD_DIM)
    q = make_queries(queries, LLAMA)
    out = torch.empty_like(q)
    starts = torch.tensor([0, queries], dtype=torch.int32, device="cuda")
    contexts = torch.tensor([context], dtype=torch.int32, device="cuda")
    scratch = make_prefill_scratch(queries, HEADS, HEAD_DIM, num_splits, "cuda")

    def call() -> None:
        prefill_attention(
            q,
            kv.keys,
            kv.values,
            kv.tables,
            starts,
            contexts,
            out,
            max_query_tokens=queries,
            block_size=BLOCK_SIZE,
            scale=HEAD_DIM**-0.5,
            num_splits=num_splits,
            scratch=scratch,
            tuning=tuning,
        )

    return time_calls([call] * (20 if queries <= 2048 else 1), 5)


def tabulate_prefill(record: Record) -> None:
    for shape in PREFILL_SHAPES:
        cells = []
        for number, tuning in enumerate(PREFILL_TUNINGS):
            for num_splits in (1, 2, 3, 4):
                if num_splits > 1 and shape[1] > 512:
                    continue
                us = record.run(
                    "prefill",
                    f"{shape} {number} splits={num_splits}",
                    lambda s=shape, t=tuning, n=num_splits: time_prefill(s, t, n),  # type: ignore[misc]
                )
                cells.append(show(us, 0) if num_splits > 1 else f"[{number}]{show(us, 0)}")
        flops = prefill_flops(shape)
        print(f"prefill {shape}, 500 TFLOP/s {flops / 5e8:.0f} us; splits 1 2 3 4:", *cells)


def time_dense(shape: Shape, batch: int = 1) -> float:
    context, queries = shape
    kv = make_paged_kv([context + queries] * batch, KV_HEADS, HEAD_DIM)
    q = make_queries(batch * queries, LLAMA).unflatten(0, (batch, queries))

    def call() -> None:
        dense_attention(
            q,
            kv.keys,
            kv.values,
            kv.tables,
            context=context,
            block_size=BLOCK_SIZE,
            scale=HEAD_DIM**-0.5,
        )

    return time_calls([call] * (20 if queries * batch <= 2048 else 1), 5)


def tabulate_dense(record: Record) -> None:
    for shape in [*PREFILL_SHAPES, (0, 1500), (4000, 2000)]:
        us = record.run("dense", str(shape), lambda s=shape: time_dense(s))  # type: ignore[misc]
        if us is not None:
            print(f"dense {shape}: {us:.0f} us = {prefill_flops(shape) / us / 1e6:.0f} TFLOP/s")
    us = record.run("dense", "32 x 2048", lambda: time_dense((0, 2048), 32))
    if us is not None:
        print(f"dense 32 x 2048: {us:.0f} us = {32 * prefill_flops((0, 2048)) / us / 1e6:.0f}")


def time_first_call(num_queries: int, num_kv: int, is_causal: bool) -> float:
    """Returns milliseconds of host time of cuDNN's first call at new lengths."""
    q = make_queries(num_queries, LLAMA).transpose(0, 1)[None]
    k = make_queries(num_kv, (KV_HEADS, KV_HEADS, HEAD_DIM)).transpose(0, 1)[None]
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, k, None, True, 0.0, is_causal, False, scale=1.0
    )
    return (time.perf_counter() - started) * 1e3


def tabulate_shapes(record: Record) -> None:
    cells = [
        show(record.run("shapes", f"{n} {m} {c}", lambda n=n, m=m, c=c: time_first_call(n, m, c)))  # type: ignore[misc]
        for n, m, c in [
            (1280, 1280, True),
            (1280, 1280, True),
            (1536, 1536, True),
            (1792, 1792, True),
            (1792, 2560, False),
            (1792, 2816, False),
            (8448, 8448, True),
        ]
    ]
    print("cuDNN's first call, ms of host time (second is a repetition):", *cells)


def main() -> None:
    parts: dict[str, Callable[[Record], None]] = {
        "some": check_some,
        "check": check_all,
        "decode": tabulate_decode,
        "prefill": tabulate_prefill,
        "dense": tabulate_dense,
        "shapes": tabulate_shapes,
    }
    torch.manual_seed(int(time.time()))
    record = Record()
    for name in sys.argv[1:] or list(parts)[1:]:
        started = time.perf_counter()
        record.run("parts", name, lambda name=name: parts[name](record))  # type: ignore[misc]
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
        record.write("attention")


if __name__ == "__main__":
    main()
