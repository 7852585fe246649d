"""Paged attention of a few query tokens per sequence, bound by the reading of KV.

Letters: M query rows, S slots, H query heads, J KV heads, G query heads per KV head, D head dim,
B sequences, T query tokens per sequence; GT is G times T.

The G * T rows that share a KV head go through the tensor cores as one matrix, so that KV is read
once. The KV of all sequences is dealt out to a fixed number of programs, so that the grid depends
on no length (`pdserve.kernels.decode_shares`); a second kernel adds the pieces of a sequence up,
always in their order (Flash-Decoding, https://pytorch.org/blog/flash-decoding/). On Hopper another
kernel does all of it in one launch (`pdserve.kernels.streamed_attention`).
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pdserve.kernels.decode_kernel import decode_kernel
from pdserve.kernels.decode_merge import merge_pieces_kernel
from pdserve.kernels.decode_scratch import DecodeScratch
from pdserve.kernels.streamed_attention import (
    StreamTuning,
    can_stream,
    choose_tuning,
    stream_attention,
)

LOG2_E = 1.4426950408889634
MAX_ROWS_PER_PROGRAM = 64
MAX_BALANCED_SPLITS = 128
SHARED_BYTES_PER_PROGRAM = 1024
"""Of each program, beside what it asks for."""
CPU_PROGRAMS = 6
"""In the interpreter: few, so that each has several pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTuning:
    """How a launch is cut; the defaults are the best measured on an H200."""

    tile_tokens: int = 32
    """KV tokens that are read at once."""
    num_warps: int = 2
    """For each 16 rows."""
    num_stages: int = 4
    """Tiles in shared memory, and one more."""
    programs_per_sm: int = 4
    least_tiles: int = 1
    """Balanced shares are no smaller."""
    prefetched_tiles: int = 0
    """Brought into L2 while the kernel ahead still runs, if `use_pdl`. Behind a kernel that keeps
    memory busy itself it only costs."""


def decode_attention(
    q_MHD: Tensor,
    keys_SJD: Tensor,
    values_SJD: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    out_MHD: Tensor,
    scratch: DecodeScratch,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    queries_per_sequence: int = 1,
    split_tokens: int | None = None,
    tuning: DecodeTuning | StreamTuning | None = None,
    use_pdl: bool = False,
) -> None:
    """Attends from the last tokens of each sequence to its KV.

    Args:
        q_MHD: rotated queries; a sequence's tokens are neighbours, oldest first.
        keys_SJD: all key slots, the queries' own tokens included.
        values_SJD: all value slots, with the keys' strides.
        block_tables: int32 [B, max_blocks].
        lengths: int32 [B], KV tokens with the queries' own. At 0 the rows of `out_MHD` are left as
            they are; else at least `queries_per_sequence`.
        out_MHD: written in place.
        scratch: of `make_scratch`, for at least M rows.
        block_size: tokens of a block.
        scale: of scores.
        window: tokens that a query sees, itself included; None for all.
        soft_cap: scores are squeezed into (-soft_cap, soft_cap) by tanh; None leaves them.
        queries_per_sequence: T; each token sees itself and what is before it.
        split_tokens: a split's size, a multiple of the tuning's tile. A sequence's result then
            depends on no other sequence, but on the scratch's `max_splits` if it needs more. None
            cuts the batch into equal parts, which is quicker.
        tuning: of the kernel to take; None for the streamed one where it serves (Hopper, equal
            parts), and else for the defaults of the other.
        use_pdl: whether the launch may begin before the kernel ahead of it has ended (sm_90).
            Lengths, tables and KV of tokens before the queries' must be older than the last launch
            without it.
    """
    num_rows, num_heads, head_dim = q_MHD.shape
    num_kv_heads = keys_SJD.shape[1]
    batch = num_rows // queries_per_sequence
    assert num_rows <= scratch.max_rows
    assert keys_SJD.stride() == values_SJD.stride()
    assert keys_SJD.stride()[1:] == (head_dim, 1) == q_MHD.stride()[1:] == out_MHD.stride()[1:]
    is_streamed = tuning is None and split_tokens is None
    if is_streamed and can_stream(q_MHD, keys_SJD, block_size, queries_per_sequence):
        tuning = choose_tuning(batch)
    if isinstance(tuning, StreamTuning):
        assert split_tokens is None
        stream_attention(
            q_MHD,
            keys_SJD,
            values_SJD,
            block_tables,
            lengths,
            out_MHD,
            scratch,
            block_size=block_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            queries_per_sequence=queries_per_sequence,
            tuning=tuning,
            use_pdl=use_pdl,
        )
        return
    tuning = DecodeTuning() if tuning is None else tuning
    rows_per_head = num_heads // num_kv_heads * queries_per_sequence
    rows = max(16, min(MAX_ROWS_PER_PROGRAM, triton.next_power_of_2(rows_per_head)))
    max_splits, least_tiles = scratch.max_splits, tuning.least_tiles
    if split_tokens is None:
        max_splits = min(MAX_BALANCED_SPLITS, scratch.splits_for(num_rows))
    else:
        assert split_tokens % tuning.tile_tokens == 0
        least_tiles = split_tokens // tuning.tile_tokens
    team = num_kv_heads * triton.cdiv(rows_per_head, rows)
    num_teams = min(max(1, _most_programs(keys_SJD, rows, tuning) // team), batch * max_splits)
    merge_rows = (
        1 if num_rows * num_heads <= 1024 else min(4, triton.next_power_of_2(rows_per_head))
    )
    shared = {
        "J": num_kv_heads,
        "GT": rows_per_head,
        "T": queries_per_sequence,
        "D": head_dim,
        "D_PAD": triton.next_power_of_2(head_dim),
        "BATCH_PAD": max(16, triton.next_power_of_2(batch)),
        "TILE": tuning.tile_tokens,
        "WINDOW": window,
        "IS_BALANCED": split_tokens is None,
        "USE_PDL": use_pdl,
        "launch_pdl": use_pdl,
    }
    decode_kernel[(num_teams * team,)](
        q_MHD,
        keys_SJD,
        values_SJD,
        block_tables,
        lengths,
        out_MHD,
        scratch.partials,
        scratch.log_sums,
        q_MHD.stride(0),
        keys_SJD.stride(0),
        block_tables.stride(0),
        out_MHD.stride(0),
        batch,
        least_tiles,
        max_splits,
        scale * LOG2_E,
        ROWS=rows,
        BLOCK_SIZE=block_size,
        SOFT_CAP=None if soft_cap is None else soft_cap * LOG2_E,
        PREFETCH=tuning.prefetched_tiles * tuning.tile_tokens,
        num_warps=tuning.num_warps * (rows // 16),
        num_stages=tuning.num_stages,
        **shared,
    )
    merge_pieces_kernel[(batch, num_kv_heads, triton.cdiv(rows_per_head, merge_rows))](
        lengths,
        scratch.partials,
        scratch.log_sums,
        out_MHD,
        out_MHD.stride(0),
        batch,
        num_teams,
        least_tiles,
        max_splits,
        MERGE_ROWS=merge_rows,
        MERGE_SPLITS=64 // merge_rows,
        num_warps=4,
        **shared,
    )


def _most_programs(keys_SJD: Tensor, rows: int, tuning: DecodeTuning) -> int:
    """Returns how many programs run at a time."""
    if keys_SJD.device.type == "cpu":
        return CPU_PROGRAMS
    properties = torch.cuda.get_device_properties(keys_SJD.device)
    row_bytes = int(triton.next_power_of_2(keys_SJD.shape[2])) * keys_SJD.dtype.itemsize
    num_rows = 2 * tuning.tile_tokens * max(1, tuning.num_stages - 1) + rows
    shared_bytes = row_bytes * num_rows + SHARED_BYTES_PER_PROGRAM
    room = int(properties.shared_memory_per_multiprocessor) // shared_bytes
    return int(properties.multi_processor_count) * max(1, min(tuning.programs_per_sm, room))
