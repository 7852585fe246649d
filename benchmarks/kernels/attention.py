"""Attention kernels on a GPU: checked against float64, then timed against their floors.

`python -m benchmarks.kernels.attention [check] [decode] [prefill] [dense]`; 32 query heads, 8 KV
heads of 128, bfloat16, blocks of 16 scattered at random. Decode's floor is the reading of KV at
4.55 TB/s; prefill is given in TFLOP/s of the causal half.
"""

import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.paged import (
    BLOCK_SIZE,
    PagedKv,
    attend_exactly,
    make_paged_kv,
    relative_error,
    time_calls,
)
from pdserve.kernels.decode_attention import DecodeTuning, decode_attention, make_scratch
from pdserve.kernels.prefill_attention import PrefillTuning, prefill_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
READ_BYTES_PER_US = 4.55e6
L2_BYTES = 60e6
RESULTS: dict[str, dict[str, object]] = {}
DECODE_TUNINGS = [
    DecodeTuning(tile_tokens=tile, num_warps=warps, num_stages=stages, programs_per_sm=per_sm)
    for tile, warps, stages, per_sm in [
        (64, 4, 3, 3),
        (64, 4, 4, 2),
        (64, 4, 5, 1),
        (64, 2, 3, 3),
        (64, 8, 4, 2),
        (32, 4, 4, 4),
        (32, 2, 4, 4),
        (32, 4, 6, 2),
        (128, 4, 3, 1),
        (128, 8, 3, 1),
        (128, 8, 2, 2),
    ]
]
PREFILL_TUNINGS = [
    PrefillTuning(
        tile_queries=m, tile_tokens=n, num_warps=warps, num_stages=stages, max_registers=registers
    )
    for m, n, warps, stages, registers in [
        (128, 64, 8, 3, None),
        (128, 64, 8, 2, 128),
        (128, 128, 8, 2, None),
        (128, 32, 4, 3, None),
        (64, 64, 4, 2, None),
        (64, 64, 4, 3, None),
        (64, 128, 4, 2, None),
    ]
]


def guarded(section: str, key: str, job: Callable[[], object]) -> object:
    """Runs a job; an error is shown and kept, and the rest goes on."""
    try:
        value = job()
    except Exception as error:  # noqa: BLE001 - one failing variant must not end the run
        last = traceback.format_exc().strip().splitlines()[-3:]
        print(f"FAILED {section} {key}: {type(error).__name__} {str(error)[:200]} {last}")
        value = None
    RESULTS.setdefault(section, {})[key] = value
    return value


def run_decode(q: Tensor, kv: PagedKv, out: Tensor, scratch: object, **options: object) -> None:
    decode_attention(
        q,
        kv.keys,
        kv.values,
        kv.tables,
        kv.lengths,
        out,
        scratch,  # type: ignore[arg-type]
        block_size=BLOCK_SIZE,
        scale=q.shape[2] ** -0.5,
        **options,  # type: ignore[arg-type]
    )


def check_decode(
    heads: tuple[int, int, int],
    lengths: list[int],
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
) -> float:
    num_heads, num_kv_heads, head_dim = heads
    kv = make_paged_kv(lengths, num_kv_heads, head_dim, is_poisoned=True)
    q = torch.randn(
        len(lengths) * queries, num_heads, head_dim, dtype=torch.bfloat16, device="cuda"
    )
    out = torch.full_like(q, 7.0)
    scratch = make_scratch(q.shape[0], num_heads, head_dim, 32, "cuda")
    for _ in range(3):  # counters must come back to zero
        run_decode(
            q,
            kv,
            out,
            scratch,
            queries_per_sequence=queries,
            window=window,
            soft_cap=soft_cap,
            split_tokens=split_tokens,
            use_pdl=True,
        )
    expected = torch.full(q.shape, 7.0, dtype=torch.float64, device="cuda")
    for row, length in enumerate(lengths):
        if length:
            rows = slice(row * queries, (row + 1) * queries)
            positions = range(length - queries, length)
            expected[rows] = attend_exactly(
                q[rows], kv, row, positions, window=window, soft_cap=soft_cap
            )
    assert int(scratch.counters.abs().sum()) == 0
    return relative_error(out, expected)


def check_prefill(
    heads: tuple[int, int, int],
    chunks: list[tuple[int, int]],
    window: int | None = None,
    soft_cap: float | None = None,
    tuning: PrefillTuning | None = None,
    max_checked: int = 96,
) -> float:
    """Compares some rows of chunks of (context, queries)."""
    num_heads, num_kv_heads, head_dim = heads
    kv = make_paged_kv([sum(chunk) for chunk in chunks], num_kv_heads, head_dim, is_poisoned=True)
    starts = [0, *itertools.accumulate(queries for _, queries in chunks)]
    q = torch.randn(starts[-1] + 5, num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.full_like(q, 7.0)
    prefill_attention(
        q,
        kv.keys,
        kv.values,
        kv.tables,
        torch.tensor(starts, dtype=torch.int32, device="cuda"),
        torch.tensor([context for context, _ in chunks], dtype=torch.int32, device="cuda"),
        out,
        max_query_tokens=max(queries for _, queries in chunks),
        block_size=BLOCK_SIZE,
        scale=head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        tuning=tuning,
        use_pdl=tuning is None,
    )
    assert bool((out[starts[-1] :] == 7.0).all()), "padding was written"
    errors = []
    for row, (context, queries) in enumerate(chunks):
        if queries:
            picked = torch.randperm(queries)[:max_checked].sort().values
            rows = picked.cuda() + starts[row]
            positions = (picked + context).tolist()
            expected = attend_exactly(q[rows], kv, row, positions, window=window, soft_cap=soft_cap)
            errors.append(relative_error(out[rows], expected))
    return max(errors, key=lambda error: (error != error, error))


def check_all() -> None:
    plain = (HEADS, KV_HEADS, HEAD_DIM)
    ragged = [1, 0, 17, 512, 3000, 63, 64, 65, 2049, 100]
    cases: dict[str, Callable[[], object]] = {
        "decode ragged": lambda: check_decode(plain, ragged),
        "decode fixed 256": lambda: check_decode(plain, ragged, split_tokens=256),
        "decode one long": lambda: check_decode(plain, [32768]),
        "decode T=4 window": lambda: check_decode(plain, [4, 700, 0, 2000], 4, window=100),
        "decode T=5 cap": lambda: check_decode((8, 8, 64), [5, 700, 0, 2000], 5, None, 20.0),
        "decode MQA 71 D=64": lambda: check_decode((71, 1, 64), [5, 700, 0, 2000]),
        "decode D=80": lambda: check_decode((32, 32, 80), [5, 700, 0, 2000]),
        "decode D=96": lambda: check_decode((24, 8, 96), [5, 700, 0, 2000]),
        "decode D=256": lambda: check_decode((16, 4, 256), [5, 700, 0, 2000], 2, 333, 50.0),
        "prefill ragged": lambda: check_prefill(plain, [(0, 333), (77, 1), (64, 0), (4096, 128)]),
        "prefill window": lambda: check_prefill(plain, [(0, 700), (500, 300)], 100),
        "prefill cap D=64": lambda: check_prefill((8, 8, 64), [(0, 700), (5, 9)], None, 20.0),
        "prefill D=80": lambda: check_prefill((32, 32, 80), [(0, 700), (5, 9)]),
        "prefill D=96": lambda: check_prefill((24, 8, 96), [(0, 700), (5, 9)]),
        "prefill D=256": lambda: check_prefill((16, 4, 256), [(0, 700), (5, 9)], 333, 50.0),
    }
    for number, tuning in enumerate(PREFILL_TUNINGS):
        chosen = tuning
        cases[f"prefill tuning {number}"] = lambda chosen=chosen: check_prefill(  # type: ignore[misc]
            plain, [(0, 2000), (513, 300)], tuning=chosen
        )
    for number, decode_tuning in enumerate(DECODE_TUNINGS):
        scheme = decode_tuning

        def one(scheme: DecodeTuning = scheme) -> float:
            kv = make_paged_kv(ragged, KV_HEADS, HEAD_DIM, is_poisoned=True)
            q = torch.randn(len(ragged), *plain[::2], dtype=torch.bfloat16, device="cuda")
            out = torch.zeros_like(q)
            run_decode(
                q,
                kv,
                out,
                make_scratch(64, HEADS, HEAD_DIM, 64, "cuda"),
                tuning=scheme,
                use_pdl=True,
            )
            expected = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
            for row, length in enumerate(ragged):
                if length:
                    expected[row] = attend_exactly(q[row : row + 1], kv, row, [length - 1])[0]
            return relative_error(out, expected)

        cases[f"decode tuning {number}"] = one
        cases[f"warm {number}"] = lambda scheme=scheme: time_decode(  # type: ignore[misc]
            64, 16, scheme, use_pdl=True, is_timed=False
        )
    # Most of this is compilation, which runs beside the others'.
    with ThreadPoolExecutor(12) as pool:
        for key, job in cases.items():
            pool.submit(guarded, "check", key, job)
    shown = " ".join(
        f"[{key}: {value}]" if value is None else f"[{key} {value:.1e}]"
        for key, value in sorted(RESULTS["check"].items())
    )
    print("errors:", shown)


def time_decode(
    batch: int,
    length: int,
    tuning: DecodeTuning | None = None,
    is_timed: bool = True,
    **options: object,
) -> float:
    if not is_timed:
        kv = make_paged_kv([length] * batch, KV_HEADS, HEAD_DIM)
        q = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        scratch = make_scratch(256, HEADS, HEAD_DIM, 16, "cuda")
        run_decode(q, kv, torch.empty_like(q), scratch, tuning=tuning, **options)
        return 0.0
    kv_bytes = 4 * batch * length * KV_HEADS * HEAD_DIM
    num_sets = max(2, min(40, int(2 * L2_BYTES / kv_bytes) + 1))
    key = (batch, length)
    if key not in CACHED:
        CACHED.clear()
        torch.cuda.empty_cache()
        CACHED[key] = [make_paged_kv([length] * batch, KV_HEADS, HEAD_DIM) for _ in range(num_sets)]
    q = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    scratch = make_scratch(256, HEADS, HEAD_DIM, 16, "cuda")
    sets = CACHED[key] * (1 if num_sets > 8 else 4)
    calls = [
        lambda kv=kv: run_decode(q, kv, out, scratch, tuning=tuning, **options)  # type: ignore[misc]
        for kv in sets
    ]
    return time_calls(calls)


CACHED: dict[tuple[int, int], list[PagedKv]] = {}


def decode_floor_us(batch: int, length: int) -> float:
    return 4 * batch * length * KV_HEADS * HEAD_DIM / READ_BYTES_PER_US


def decode_table() -> None:
    from dataclasses import replace

    main = [(64, 2048), (1, 32768)]
    others = [(1, 16), (1, 512), (8, 512), (64, 512), (256, 512), (256, 2048), (8, 8192)]
    best: dict[tuple[int, int], tuple[float, DecodeTuning]] = {}
    for shape in main:
        for number, tuning in enumerate(DECODE_TUNINGS):
            for rounds in (1, 2, 4):
                trial = replace(tuning, rounds=rounds)
                us = guarded(
                    "decode",
                    f"{shape} {number} rounds={rounds}",
                    lambda shape=shape, trial=trial: time_decode(*shape, trial, use_pdl=True),
                )
                if isinstance(us, float) and us < best.get(shape, (1e9, trial))[0]:
                    best[shape] = (us, trial)
    for shape in main:
        rows = []
        for number in range(len(DECODE_TUNINGS)):
            cells = [RESULTS["decode"].get(f"{shape} {number} rounds={r}") for r in (1, 2, 4)]
            rows.append(f"{number}:" + "/".join(f"{c:.1f}" if c else "-" for c in cells))
        print(f"decode {shape} floor {decode_floor_us(*shape):.1f} us, rounds 1/2/4:", *rows)
    picks = list(dict.fromkeys([tuning for _, tuning in best.values()]))
    for shape in others + main:
        cells = []
        for tuning in picks:
            name = (
                f"{tuning.tile_tokens}/{tuning.num_warps}/{tuning.num_stages}/"
                f"{tuning.programs_per_sm}/r{tuning.rounds}"
            )
            for pdl, split in ((True, None), (False, None), (True, 256))[
                : 3 if tuning is picks[0] else 1
            ]:
                us = guarded(
                    "decode more",
                    f"{shape} {name} pdl={pdl} split={split}",
                    lambda s=shape, t=tuning, p=pdl, f=split: time_decode(
                        *s, t, use_pdl=p, split_tokens=f
                    ),
                )
                cells.append(f"{us:.1f}" if isinstance(us, float) else "-")
            for least in (64, 256, 512):
                us = guarded(
                    "decode more",
                    f"{shape} {name} min={least}",
                    lambda s=shape, t=tuning, least=least: time_decode(
                        *s, replace(t, min_split_tokens=least), use_pdl=True
                    ),
                )
                cells.append(f"{us:.1f}" if isinstance(us, float) else "-")
            cells.append(f"({name})")
        print(
            f"decode {shape} floor {decode_floor_us(*shape):.1f}; pdl, no pdl, fixed 256, "
            "min 64, 256, 512:",
            *cells,
        )


def prefill_flops(context: int, queries: int) -> float:
    return 4.0 * HEADS * HEAD_DIM * (queries * context + queries * (queries + 1) / 2)


def time_prefill(context: int, queries: int, tuning: PrefillTuning | None, batch: int = 1) -> float:
    kv = make_paged_kv([context + queries] * batch, KV_HEADS, HEAD_DIM)
    q = torch.randn(batch * queries, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
    contexts = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    call = lambda: prefill_attention(  # noqa: E731
        q,
        kv.keys,
        kv.values,
        kv.tables,
        starts,
        contexts,
        out,
        max_query_tokens=queries,
        block_size=BLOCK_SIZE,
        scale=SCALE,
        tuning=tuning,
    )
    return time_calls([call] * (20 if queries <= 2048 else 1), 5)


PREFILL_SHAPES = [(0, 128), (0, 512), (0, 2048), (0, 8192), (0, 32768), (4096, 128), (4096, 2048)]


def prefill_table() -> None:
    for shape in PREFILL_SHAPES:
        cells = []
        for number, tuning in enumerate(PREFILL_TUNINGS):
            us = guarded(
                "prefill",
                f"{shape} {number}",
                lambda s=shape, t=tuning: time_prefill(*s, t),
            )
            if isinstance(us, float):
                cells.append(f"{number}:{us:.0f}us={prefill_flops(*shape) / us / 1e6:.0f}")
        print(f"prefill {shape} us=TFLOP/s:", *cells)
    us = guarded("prefill", "32 x 2048", lambda: time_prefill(0, 2048, PREFILL_TUNINGS[0], 32))
    if isinstance(us, float):
        print(f"prefill 32 x 2048: {us:.0f} us = {32 * prefill_flops(0, 2048) / us / 1e6:.0f}")


def cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=SCALE
    )
    return result[0], result[1]


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=SCALE
    )
    return result[0], result[1]


def expanded(k: Tensor) -> Tensor:
    return k[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2)


def dense_table() -> None:
    ops = {"cudnn": cudnn, "flash": flash}
    for context, queries in PREFILL_SHAPES:
        kv = make_paged_kv([context + queries], KV_HEADS, HEAD_DIM)
        rows = torch.randn(queries, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        q = rows.transpose(0, 1)[None]
        blocks = kv.tables[0].long()
        gathered: list[Tensor] = []

        def gather(kv: PagedKv = kv, blocks: Tensor = blocks) -> list[Tensor]:
            return [
                part.view(-1, BLOCK_SIZE, KV_HEADS, HEAD_DIM).index_select(0, blocks).flatten(0, 1)
                for part in (kv.keys, kv.values)
            ]

        gathered = gather()
        k, v = (part[: context + queries].transpose(0, 1)[None] for part in gathered)
        repeat = 20 if queries <= 2048 else 1
        cells = []
        us = guarded("dense", f"gather {context, queries}", lambda: time_calls([gather] * repeat))
        cells.append(f"gather {us:.1f}us" if isinstance(us, float) else "gather -")
        picked = torch.randperm(queries)[:64].sort().values
        expected = attend_exactly(rows[picked.cuda()], kv, 0, (picked + context).tolist())
        for name, op in ops.items():
            for is_expanded in (False, True):
                label = f"{name}{'+expand' if is_expanded else ''} {context, queries}"
                shape = expanded if is_expanded else (lambda part: part)

                def attend(op=op, shape=shape, k=k, v=v, q=q, context=context):  # type: ignore[no-untyped-def]
                    if context == 0:
                        return op(q, shape(k), shape(v), True)
                    far = op(q, shape(k[:, :, :context]), shape(v[:, :, :context]), False)
                    near = op(q, shape(k[:, :, context:]), shape(v[:, :, context:]), True)
                    lse_far, lse_near = (
                        part[1].reshape(1, HEADS, -1)[..., None].float() for part in (far, near)
                    )
                    weight = torch.sigmoid(lse_near - lse_far)
                    return torch.lerp(far[0].float(), near[0].float(), weight).bfloat16(), None

                def error(attend=attend, picked=picked, expected=expected) -> float:  # type: ignore[no-untyped-def]
                    out = attend()[0][0].transpose(0, 1)
                    return relative_error(out[picked.cuda()], expected)

                err = guarded("dense", f"error {label}", error)
                us = guarded(
                    "dense",
                    label,
                    lambda attend=attend, repeat=repeat: time_calls([attend] * repeat, 5),
                )
                if isinstance(us, float) and isinstance(err, float):
                    rate = prefill_flops(context, queries) / us / 1e6
                    cells.append(
                        f"{name}{'+x' if is_expanded else ''} {us:.0f}us={rate:.0f} e{err:.0e}"
                    )
        print(f"dense {context, queries}:", *cells)
    q = torch.randn(1, HEADS, 256, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, KV_HEADS, 256, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    scores = q.double() @ expanded(k).double().transpose(2, 3) * SCALE
    hidden = torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)
    for name, op in ops.items():
        for is_causal in (True, False):
            lse = (scores.masked_fill(hidden, float("-inf")) if is_causal else scores).logsumexp(-1)
            found = guarded(
                "dense",
                f"lse {name} {is_causal}",
                lambda op=op, is_causal=is_causal, lse=lse: [
                    relative_error(
                        op(q, expanded(k), expanded(k), is_causal)[1].reshape(lse.shape), lse
                    ),
                    list(op(q, expanded(k), expanded(k), is_causal)[1].shape),
                ],
            )
            print("lse", name, "causal" if is_causal else "full", found)


def main() -> None:
    parts = {
        "check": check_all,
        "decode": decode_table,
        "prefill": prefill_table,
        "dense": dense_table,
    }
    torch.manual_seed(int(time.time()))
    folder = Path(os.environ.get("OUT", "."))
    for name in sys.argv[1:] or list(parts):
        started = time.perf_counter()
        guarded("parts", name, parts[name])
        (folder / "attention.json").write_text(json.dumps(RESULTS, indent=1, default=str))
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
