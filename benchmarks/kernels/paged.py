"""Paged KV of random sequences, attention over it in float64, and timing through CUDA graphs.

Letters as in `pdserve.kernels.decode_attention`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKv:
    """KV of a batch, its blocks scattered at random."""

    keys: Tensor
    """[S, J, D]."""
    values: Tensor
    tables: Tensor
    """int32 [B, max_blocks]."""
    lengths: Tensor
    """int32 [B]."""
    last_slots: Tensor
    """int32 [B], of each sequence's last token; negative if it has none."""
    block_size: int = BLOCK_SIZE

    def slots(self, sequence: int, num_tokens: int) -> Tensor:
        """Returns where a sequence's first tokens lie."""
        index = torch.arange(num_tokens, device=self.tables.device)
        blocks = self.tables[sequence].long()[index // self.block_size]
        return blocks * self.block_size + index % self.block_size


def make_paged_kv(
    lengths: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    *,
    is_poisoned: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    block_size: int = BLOCK_SIZE,
) -> PagedKv:
    """Makes random KV; slots that no sequence has written are NaN if asked for."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts)
    order = torch.randperm(num_blocks, device=device).int()
    tables = torch.zeros(len(lengths), max(*counts, 1), dtype=torch.int32, device=device)
    blocks = order.tolist()
    last_slots, first = [], 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        last_slots.append(
            blocks[first - 1] * block_size + (length - 1) % block_size if length else -1
        )
    shape = (num_blocks * block_size, num_kv_heads, head_dim)
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    kv = PagedKv(
        keys=keys,
        values=values,
        tables=tables,
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        last_slots=torch.tensor(last_slots, dtype=torch.int32, device=device),
        block_size=block_size,
    )
    if is_poisoned:
        is_written = torch.zeros(shape[0], dtype=torch.bool, device=device)
        for row, length in enumerate(lengths):
            is_written[kv.slots(row, length)] = True
        keys[~is_written] = float("nan")
        values[~is_written] = float("nan")
    return kv


def attend_exactly(
    q: Tensor,
    kv: PagedKv,
    sequence: int,
    positions: Sequence[int],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attends from single tokens in float64, [T, H, D]."""
    group = q.shape[1] // kv.keys.shape[1]
    slots = kv.slots(sequence, max(positions) + 1)
    keys, values = (part[slots].double() for part in (kv.keys, kv.values))
    grouped = q.double().unflatten(1, (-1, group))
    scores = torch.einsum("tjgd,sjd->tjgs", grouped, keys) / q.shape[2] ** 0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    ages = torch.tensor(positions, device=slots.device)[:, None] - torch.arange(
        len(slots), device=slots.device
    )
    is_hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
    scores.masked_fill_(is_hidden[:, None, None, :], float("-inf"))
    return torch.einsum("tjgs,sjd->tjgd", scores.softmax(-1), values).flatten(1, 2)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Returns ||out - expected|| / ||expected||; NaN stays NaN."""
    return float((out.double() - expected).norm() / expected.norm())


def time_calls(calls: Sequence[Callable[[], object]], num_replays: int = 12) -> float:
    """Returns microseconds per call of a graph that runs all calls once; median of replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)
