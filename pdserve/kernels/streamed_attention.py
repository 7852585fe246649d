"""When and how decode attention is streamed: the launch of `pdserve.kernels.streamed_decode`.

Letters as in `pdserve.kernels.decode_attention`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdserve.kernels.decode_scratch import DecodeScratch
from pdserve.kernels.gluon_version import has_known_gluon
from pdserve.kernels.streamed_decode import streamed_decode_kernel

LOG2_E = 1.4426950408889634
TILE_TOKENS = 64
"""Rows of one tensor core instruction."""
CHUNK = 64
"""Elements of a row that one copy brings."""
LEAST_UNIT_TOKENS = 16
MAX_ROWS = 32
MAX_SPLITS = 128
SHARED_BYTES = 224 * 1024
"""Of a multiprocessor, for all its programs."""
NUM_WARPS = 4
"""That attend: one warpgroup."""
NUM_THREADS = 256
"""With those of the warp that fills the ring, which come as a warpgroup too."""
REGISTERS = 65536
"""Of a multiprocessor."""
MAX_REGISTERS = 248
FILLING_REGISTERS = 40
EVEN_SPLITS = 16
"""Of many pieces, so many are merged at once."""
LEAST_PROGRAMS = 0.9
"""Of all that would run, for the sake of even cuts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTuning:
    """How a streamed launch is cut; the defaults are the best measured on an H200."""

    programs_per_sm: int = 2
    num_stages: int = 8
    """Tiles in shared memory, or as many as fit."""
    least_units: int = 4
    """Shares are no smaller."""


def can_stream(q_MHD: Tensor, keys_SJD: Tensor, block_size: int, queries_per_sequence: int) -> bool:
    """Says whether the kernel serves such tensors: Hopper, 16-bit floats, large enough blocks."""
    if not q_MHD.is_cuda or not has_known_gluon():
        return False
    if torch.cuda.get_device_capability(q_MHD.device)[0] != 9:
        return False
    num_heads, head_dim = q_MHD.shape[1:]
    rows = num_heads // keys_SJD.shape[1] * queries_per_sequence
    return (
        q_MHD.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128, 256)
        and rows <= MAX_ROWS
        and block_size >= LEAST_UNIT_TOKENS
        and block_size & (block_size - 1) == 0
        and keys_SJD.stride(0) % 8 == 0
    )


def choose_tuning(batch: int) -> StreamTuning:
    """Returns the tuning for a batch: one long sequence is better in half as many pieces."""
    return StreamTuning(programs_per_sm=1 if batch == 1 else 2)


def count_teams(most_teams: int, batch: int, max_splits: int) -> int:
    """Returns how many teams share the KV of a batch.

    A few less than there could be, if sequences of equal length are then cut in equal parts, or not
    at all: what is not cut needs no merging.
    """
    if batch >= most_teams:
        even = triton.cdiv(batch, triton.cdiv(batch, most_teams))
    else:
        splits = min(most_teams // batch, max_splits)
        even = batch * (splits // EVEN_SPLITS * EVEN_SPLITS if splits > EVEN_SPLITS else splits)
    most_teams = min(most_teams, batch * max_splits)
    return even if even >= LEAST_PROGRAMS * most_teams else most_teams


def stream_attention(
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
    window: int | None,
    soft_cap: float | None,
    queries_per_sequence: int,
    tuning: StreamTuning,
    use_pdl: bool,
) -> None:
    """Does what `decode_attention` says, without splits of a fixed size; see `can_stream`."""
    num_rows, num_heads, head_dim = q_MHD.shape
    num_slots, num_kv_heads, _ = keys_SJD.shape
    batch = num_rows // queries_per_sequence
    rows = num_heads // num_kv_heads * queries_per_sequence
    unit = min(block_size, TILE_TOKENS)
    max_splits = min(MAX_SPLITS, scratch.splits_for(num_rows))
    stage_bytes = 2 * TILE_TOKENS * head_dim * q_MHD.element_size()
    padded_rows = max(8, triton.next_power_of_2(rows))
    row_bytes = padded_rows * (head_dim + TILE_TOKENS) * q_MHD.element_size() + 2048
    programs_per_sm = max(1, min(tuning.programs_per_sm, SHARED_BYTES // (2 * stage_bytes)))
    room = (SHARED_BYTES // programs_per_sm - row_bytes) // stage_bytes
    num_sms = torch.cuda.get_device_properties(q_MHD.device).multi_processor_count
    most_teams = max(1, num_sms * programs_per_sm // num_kv_heads)
    num_teams = count_teams(most_teams, batch, max_splits)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys, values = (
        TensorDescriptor(
            part,
            [num_slots, num_kv_heads * head_dim],
            [part.stride(0), 1],
            [unit, CHUNK],
            layout,
        )
        for part in (keys_SJD, values_SJD)
    )
    streamed_decode_kernel[(num_teams * num_kv_heads,)](
        keys,
        values,
        q_MHD,
        block_tables,
        lengths,
        out_MHD,
        scratch.partials,
        scratch.log_sums,
        scratch.arrivals,
        q_MHD.stride(0),
        block_tables.stride(0),
        out_MHD.stride(0),
        batch,
        tuning.least_units,
        max_splits,
        scale * LOG2_E,
        J=num_kv_heads,
        GT=rows,
        T=queries_per_sequence,
        D=head_dim,
        ROWS=padded_rows,
        MERGE_ROWS=triton.next_power_of_2(rows),
        BATCH_PAD=1 if batch == 1 else max(128, triton.next_power_of_2(batch)),
        BLOCK_SIZE=block_size,
        UNIT=unit,
        TILE=TILE_TOKENS,
        NUM_STAGES=min(tuning.num_stages, room),
        WINDOW=window,
        SOFT_CAP=None if soft_cap is None else soft_cap * LOG2_E,
        USE_PDL=use_pdl,
        num_warps=NUM_WARPS,
        launch_pdl=use_pdl,
        WORKER_REGS=FILLING_REGISTERS,
        maxnreg=min(MAX_REGISTERS, REGISTERS // (programs_per_sm * NUM_THREADS) // 8 * 8),
    )
