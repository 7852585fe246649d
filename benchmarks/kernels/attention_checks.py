"""Attention kernels against float64 on a GPU, in bfloat16, over odd shapes and poisoned KV."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.kernels.paged import (
    BLOCK_SIZE,
    PagedKv,
    attend_exactly,
    make_paged_kv,
    relative_error,
)
from pdserve.kernels.decode_attention import DecodeTuning, decode_attention
from pdserve.kernels.decode_scratch import DecodeScratch, make_scratch
from pdserve.kernels.dense_attention import dense_attention
from pdserve.kernels.prefill_attention import make_scratch as make_prefill_scratch
from pdserve.kernels.prefill_attention import prefill_attention
from pdserve.kernels.prefill_tuning import PrefillTuning
from pdserve.kernels.rotary_store import rotate_and_store
from pdserve.kernels.streamed_attention import StreamTuning

Tuning = DecodeTuning | StreamTuning
Heads = tuple[int, int, int]
"""Query heads, KV heads, head dim."""
LLAMA: Heads = (32, 8, 128)
RAGGED = (1, 0, 17, 512, 3000, 63, 64, 65, 2049, 100)
UNTOUCHED = 7.0


def make_queries(num_rows: int, heads: Heads) -> torch.Tensor:
    return torch.randn(num_rows, heads[0], heads[2], dtype=torch.bfloat16, device="cuda")


def run_decode(
    q: torch.Tensor,
    kv: PagedKv,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
    tuning: Tuning | None = None,
    use_pdl: bool = True,
) -> None:
    decode_attention(
        q,
        kv.keys,
        kv.values,
        kv.tables,
        kv.lengths,
        out,
        scratch,
        block_size=kv.block_size,
        scale=q.shape[2] ** -0.5,
        window=window,
        soft_cap=soft_cap,
        queries_per_sequence=queries,
        split_tokens=split_tokens,
        tuning=tuning,
        use_pdl=use_pdl,
    )


def check_decode(
    heads: Heads,
    lengths: tuple[int, ...],
    *,
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
    tuning: Tuning | None = None,
    block_size: int = BLOCK_SIZE,
) -> float:
    kv = make_paged_kv(lengths, heads[1], heads[2], is_poisoned=True, block_size=block_size)
    q = make_queries(len(lengths) * queries, heads)
    scratch = make_scratch(q.shape[0], heads[0], heads[2], 64, "cuda")
    scratch.partials.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    out = torch.full_like(q, UNTOUCHED)
    run_decode(
        q,
        kv,
        out,
        scratch,
        queries=queries,
        window=window,
        soft_cap=soft_cap,
        split_tokens=split_tokens,
        tuning=tuning,
    )
    expected = torch.full(q.shape, UNTOUCHED, dtype=torch.float64, device="cuda")
    errors = []
    for row, length in enumerate(lengths):
        rows = slice(row * queries, (row + 1) * queries)
        if length:
            positions = range(length - queries, length)
            expected[rows] = attend_exactly(
                q[rows], kv, row, positions, window=window, soft_cap=soft_cap
            )
        errors.append(relative_error(out[rows], expected[rows]))
    return max(errors, key=lambda error: (error != error, error))


def make_rotation(q: torch.Tensor, kv: PagedKv) -> Callable[[], None]:
    """Returns the launch that is before attention in a step.

    It writes made-up queries, and keys and values of each sequence's last token.
    """
    num_kv_heads, head_dim = kv.keys.shape[1:]
    batch, num_heads, _ = q.shape
    qkv = make_queries(batch, (num_heads + 2 * num_kv_heads, num_kv_heads, head_dim))
    positions = torch.zeros(batch, dtype=torch.int32, device=q.device)
    table = torch.ones(1, head_dim // 2, device=q.device)

    def rotate() -> None:
        rotate_and_store(
            qkv.flatten(1).unsqueeze(0),
            positions,
            kv.last_slots,
            table,
            table,
            kv.keys,
            kv.values,
            q,
            num_heads=num_heads,
            is_rotated=False,
            use_pdl=True,
        )

    return rotate


def check_behind_rotation(lengths: tuple[int, ...], *, tuning: Tuning) -> float:
    """Attends, in one graph, behind the kernel that stores the last token; worst of 20 replays."""
    kv = make_paged_kv(lengths, LLAMA[1], LLAMA[2], is_poisoned=True)
    q = make_queries(len(lengths), LLAMA)
    scratch = make_scratch(q.shape[0], LLAMA[0], LLAMA[2], 64, "cuda")
    out = torch.full_like(q, UNTOUCHED)
    rotate = make_rotation(q, kv)
    rotate()
    run_decode(q, kv, out, scratch, tuning=tuning)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate()
        run_decode(q, kv, out, scratch, tuning=tuning)
    expected = torch.full(q.shape, UNTOUCHED, dtype=torch.float64, device="cuda")
    for row, length in enumerate(lengths):
        if length:
            expected[row : row + 1] = attend_exactly(q[row : row + 1], kv, row, [length - 1])
    errors = []
    slots = kv.last_slots[kv.last_slots >= 0].long()
    for _ in range(20):
        for written in (q, out):
            written.fill_(UNTOUCHED)
        for part in (kv.keys, kv.values):
            part[slots] = float("nan")
        graph.replay()
        errors += [relative_error(out[row], expected[row]) for row in range(len(lengths))]
    return max(errors, key=lambda error: (error != error, error))


def count_changed_by_repetition(
    lengths: tuple[int, ...], *, tuning: Tuning, num_launches: int = 16, num_replays: int = 400
) -> float:
    """Returns how many outputs have other bits when launches of a chain are repeated."""
    kv = make_paged_kv(lengths, LLAMA[1], LLAMA[2])
    q = make_queries(len(lengths), LLAMA)
    scratch = make_scratch(len(lengths), LLAMA[0], LLAMA[2], 64, "cuda")
    outs = [torch.zeros_like(q) for _ in range(num_launches)]
    first = torch.zeros_like(q)
    run_decode(q, kv, first, scratch, tuning=tuning)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            run_decode(q, kv, out, scratch, tuning=tuning)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(num_replays):
        graph.replay()
        if replay % 8 == 0:
            for out in outs:
                changed += (out != first).sum()
                out.zero_()
    return float(changed)


def check_prefill(
    heads: Heads,
    chunks: tuple[tuple[int, int], ...],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int = 1,
    tuning: PrefillTuning | None = None,
    max_checked: int = 96,
) -> float:
    """Compares some rows of each chunk (context, queries)."""
    kv = make_paged_kv([sum(chunk) for chunk in chunks], heads[1], heads[2], is_poisoned=True)
    starts = [0, *itertools.accumulate(queries for _, queries in chunks)]
    q = make_queries(starts[-1] + 5, heads)
    out = torch.full_like(q, UNTOUCHED)
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
        scale=heads[2] ** -0.5,
        window=window,
        soft_cap=soft_cap,
        num_splits=num_splits,
        scratch=make_prefill_scratch(q.shape[0], heads[0], heads[2], num_splits, "cuda"),
        tuning=tuning,
        use_pdl=tuning is None,
    )
    assert bool((out[starts[-1] :] == UNTOUCHED).all()), "padding was written"
    errors = []
    for row, (context, queries) in enumerate(chunks):
        if queries:
            picked = torch.randperm(queries)[:max_checked].sort().values
            rows = picked.cuda() + starts[row]
            positions = (picked + context).tolist()
            expected = attend_exactly(q[rows], kv, row, positions, window=window, soft_cap=soft_cap)
            errors.append(relative_error(out[rows], expected))
    return max(errors, key=lambda error: (error != error, error))


def count_changed_by_cuts() -> float:
    """Returns how many prefill outputs have other bits if their prompt is cut; 0 is right."""
    num_tokens, changed = 1000, 0
    kv = make_paged_kv([num_tokens], LLAMA[1], LLAMA[2])
    q = make_queries(num_tokens, LLAMA)

    def attend(first: int, last: int) -> torch.Tensor:
        out = torch.empty_like(q[first:last])
        prefill_attention(
            q[first:last],
            kv.keys,
            kv.values,
            kv.tables,
            torch.tensor([0, last - first], dtype=torch.int32, device="cuda"),
            torch.tensor([first], dtype=torch.int32, device="cuda"),
            out,
            max_query_tokens=last - first,
            block_size=BLOCK_SIZE,
            scale=LLAMA[2] ** -0.5,
        )
        return out

    whole = attend(0, num_tokens)
    # Pieces of up to 256 rows have other tiles.
    for cut in (1, 16, 77, 512, 800, 999):
        cut_up = torch.cat([attend(0, cut), attend(cut, num_tokens)])
        changed += int((cut_up != whole).sum())
    return float(changed)


def count_changed_by_batch() -> float:
    """Returns how many decode outputs with fixed splits have other bits alone; 0 is right."""
    lengths, changed = (3000, 1, 64, 700, 513), 0
    kv = make_paged_kv(lengths, LLAMA[1], LLAMA[2])
    q = make_queries(len(lengths), LLAMA)
    scratch = make_scratch(64, LLAMA[0], LLAMA[2], 16, "cuda")
    together = torch.empty_like(q)
    run_decode(q, kv, together, scratch, split_tokens=256)
    for row in range(len(lengths)):
        alone = torch.empty_like(q[:1])
        part = replace(kv, tables=kv.tables[row : row + 1], lengths=kv.lengths[row : row + 1])
        run_decode(q[row : row + 1], part, alone, scratch, split_tokens=256)
        changed += int((alone[0] != together[row]).sum())
    return float(changed)


def check_dense(context: int, num_queries: int, batch: int = 1, heads: Heads = LLAMA) -> float:
    kv = make_paged_kv([context + num_queries] * batch, heads[1], heads[2], is_poisoned=True)
    q = make_queries(batch * num_queries, heads).unflatten(0, (batch, num_queries))
    out = dense_attention(
        q,
        kv.keys,
        kv.values,
        kv.tables,
        context=context,
        block_size=BLOCK_SIZE,
        scale=heads[2] ** -0.5,
    )
    errors = []
    for row in range(batch):
        picked = torch.randperm(num_queries)[:96].sort().values
        expected = attend_exactly(q[row][picked.cuda()], kv, row, (picked + context).tolist())
        errors.append(relative_error(out[row][picked.cuda()], expected))
    return max(errors, key=lambda error: (error != error, error))


def make_checks() -> dict[str, Callable[[], float]]:
    some = (5, 700, 0, 2000)
    return {
        "decode ragged": lambda: check_decode(LLAMA, RAGGED),
        "decode fixed 256": lambda: check_decode(LLAMA, RAGGED, split_tokens=256),
        "decode one long": lambda: check_decode(LLAMA, (32768,)),
        "decode T=4 window": lambda: check_decode(LLAMA, some, queries=4, window=100),
        "decode T=5 cap": lambda: check_decode((8, 8, 64), some, queries=5, soft_cap=20.0),
        "decode T=16": lambda: check_decode(LLAMA, (16, 700, 0, 2000), queries=16),
        "decode MQA 71": lambda: check_decode((71, 1, 64), some),
        "decode D=80": lambda: check_decode((32, 32, 80), some),
        "decode D=96": lambda: check_decode((24, 8, 96), some),
        "decode D=256": lambda: check_decode((16, 4, 256), some, queries=2, window=333),
        "prefill ragged": lambda: check_prefill(LLAMA, ((0, 333), (77, 1), (64, 0), (4096, 128))),
        "prefill splits": lambda: check_prefill(
            LLAMA, ((0, 333), (77, 1), (64, 0), (4096, 128)), num_splits=8
        ),
        "prefill window": lambda: check_prefill(LLAMA, ((0, 700), (500, 300)), window=100),
        "prefill window splits": lambda: check_prefill(
            LLAMA, ((0, 70), (500, 30)), window=100, num_splits=3
        ),
        "prefill cap D=64": lambda: check_prefill((8, 8, 64), ((0, 700), (5, 9)), soft_cap=20.0),
        "prefill D=80": lambda: check_prefill((32, 32, 80), ((0, 700), (5, 9))),
        "prefill D=96": lambda: check_prefill((24, 8, 96), ((0, 700), (5, 9))),
        "prefill D=256": lambda: check_prefill((16, 4, 256), ((0, 700), (5, 9)), window=333),
        "dense 2048": lambda: check_dense(0, 2048),
        "dense 300+1500": lambda: check_dense(300, 1500),
        "dense 4096+1024": lambda: check_dense(4096, 1024),
        "dense 3 x 700": lambda: check_dense(40, 700, 3),
        "bits changed by cuts": count_changed_by_cuts,
        "bits changed by the batch": count_changed_by_batch,
        "dense D=64": lambda: check_dense(0, 1111, 1, (8, 2, 64)),
    }
