"""Attention kernels on a GPU: checked against float64, then prefill is timed against its floor.

`python -m benchmarks.kernels.attention [check] [prefill] [dense] [shapes]`, all of them by default;
`some` is a short check for compute-sanitizer. 32 query heads, 8 KV heads of 128, bfloat16, blocks
of 16 scattered at random; TFLOP/s of the causal half. Decode: `benchmarks.kernels.decode`.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.kernels.attention_checks import (
    LLAMA,
    check_decode,
    check_prefill,
    make_checks,
    make_queries,
)
from benchmarks.kernels.paged import BLOCK_SIZE, make_paged_kv, time_calls
from benchmarks.kernels.record import Record, show
from pdserve.kernels.dense_attention import dense_attention
from pdserve.kernels.prefill_attention import make_scratch as make_prefill_scratch
from pdserve.kernels.prefill_attention import prefill_attention
from pdserve.kernels.prefill_tuning import PrefillTuning

HEADS, KV_HEADS, HEAD_DIM = LLAMA
Shape = tuple[int, int]
"""Tokens before a chunk, tokens of it."""
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


def check_all(record: Record) -> None:
    jobs: dict[str, Callable[[], float]] = dict(make_checks())
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
