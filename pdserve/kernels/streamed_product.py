"""Hopper's matrix product for few rows: weights streamed through a ring in shared memory.

Letters: M rows, N outputs, K inputs, S splits of K. Written in Gluon (Triton's explicit dialect),
because four things decide here that plain Triton leaves to its pipeliner:

1. The weight tile is the FIRST operand of the tensor core instruction, so that few rows cost few
   columns: acc[BLOCK_N, BLOCK_M] = W_tile @ x_tile^T, with BLOCK_M from 8 to 256.
2. A ring of NUM_STAGES tiles, filled by the bulk copy engine, keeps up to 200 KiB of weights a
   multiprocessor in flight: what HBM needs to run at full rate.
3. Weights do not depend on the kernel before, so the whole ring is requested BEFORE
   `griddepcontrol.wait`; only then are the rows of x read. In a chain of kernels the memory
   hardly falls idle between two products. (On an H200, in the chain of a decode step, asking for
   the next product's weights into L2 as well cost 0.3 to 11 %, the more the more was asked for;
   launching the dependents only at the end cost 5 to 16 %.)
4. A result of 64 rows or more is turned in shared memory and leaves in whole lines: a register
   holds but 2 bytes of a line. (On an H200: 2 % of the widest product at 128 rows, 2-5 % at 256.)

A gated product reads two tiles a stage, of the weight's upper half (gate) and lower half (up), and
writes silu(gate) * up: neither half's result goes to memory, and no kernel stands between it and
the next product.

The order in which a result is added up depends on K and S alone, neither on M nor on the tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def _locate(unit, num_m_tiles, num_splits, num_k_blocks):
    """Returns where a unit of work lies: tile of N, tile of M, split, first and last block of K."""
    m_tile = unit % num_m_tiles
    rest = unit // num_m_tiles
    split = rest % num_splits
    n_tile = rest // num_splits
    k_begin = num_k_blocks * split // num_splits
    k_end = num_k_blocks * (split + 1) // num_splits
    return n_tile, m_tile, split, k_begin, k_end


@gluon.jit
def _advance(unit, n_tile, m_tile, k, k_end, step, num_m_tiles, num_splits, num_k_blocks):
    """Goes on by a block of K, at a unit's end to the program's next unit."""
    k += 1
    if k == k_end:
        unit += step
        n_tile, m_tile, _, k, k_end = _locate(unit, num_m_tiles, num_splits, num_k_blocks)
    return unit, n_tile, m_tile, k, k_end


@gluon.jit
def _request_weights(
    weight_desc, weights, ready, stage, n_begin, k_begin, num_outputs, is_wanted,
    NUM_PARTS: gl.constexpr,
):  # fmt: skip
    """Asks for a stage's tile of weights, of a gated product for one of each half."""
    for part in gl.static_range(NUM_PARTS):
        tma.async_copy_global_to_shared(
            weight_desc,
            [n_begin + part * num_outputs, k_begin],
            ready,
            weights.index(stage * NUM_PARTS + part),
            pred=is_wanted,
        )


@gluon.jit
def _store_tile(out_desc, ring, acc, split, m_begin, n_begin):
    """Writes sums through shared memory: registers of a warp hold but a piece of each line."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    tile = ring._reinterpret(out_desc.dtype, [1, BLOCK_M, BLOCK_N], out_desc.layout)
    # all warps have read the last tiles of the ring
    gl.thread_barrier()
    tile.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).store(acc.to(out_desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [split, m_begin, n_begin], tile)
    tma.store_wait(0)


@gluon.jit(
    # one compiled kernel serves every shape and split
    do_not_specialize=[
        "num_rows",
        "num_outputs",
        "num_splits",
        "num_k_blocks",
        "num_m_tiles",
        "num_units",
    ]
)
def streamed_product_kernel(
    weight_desc,
    x_desc,
    out_desc,
    out_ptr,
    num_rows,
    num_outputs,
    num_splits,
    num_k_blocks,
    num_m_tiles,
    num_units,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    IS_GATED: gl.constexpr,
    HAS_BULK_STORE: gl.constexpr,
    USE_PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes out[split, m, n] for units program_id, program_id + programs, ..."""
    NUM_PARTS: gl.constexpr = 2 if IS_GATED else 1
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_desc.dtype
    weights = gl.allocate_shared_memory(
        dtype, [NUM_STAGES * NUM_PARTS, BLOCK_N, BLOCK_K], weight_desc.layout
    )
    rows = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()

    stage_bytes: gl.constexpr = NUM_PARTS * weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    first = gl.program_id(0)
    step = gl.num_programs(0)

    load_unit = first
    load_n, load_m, _, load_k, load_end = _locate(first, num_m_tiles, num_splits, num_k_blocks)
    for stage in gl.static_range(NUM_STAGES):
        has_load = load_unit < num_units
        mbarrier.expect(full.index(stage), stage_bytes, pred=has_load)
        _request_weights(
            weight_desc, weights, full.index(stage), stage, load_n * BLOCK_N, load_k * BLOCK_K,
            num_outputs, has_load, NUM_PARTS,
        )  # fmt: skip
        load_unit, load_n, load_m, load_k, load_end = _advance(
            load_unit, load_n, load_m, load_k, load_end, step,
            num_m_tiles, num_splits, num_k_blocks,
        )  # fmt: skip
    if USE_PDL:
        gdc_wait()
    load_unit = first
    load_n, load_m, _, load_k, load_end = _locate(first, num_m_tiles, num_splits, num_k_blocks)
    for stage in gl.static_range(NUM_STAGES):
        tma.async_copy_global_to_shared(
            x_desc,
            [load_m * BLOCK_M, load_k * BLOCK_K],
            full.index(stage),
            rows.index(stage),
            pred=load_unit < num_units,
        )
        load_unit, load_n, load_m, load_k, load_end = _advance(
            load_unit, load_n, load_m, load_k, load_end, step,
            num_m_tiles, num_splits, num_k_blocks,
        )  # fmt: skip

    # A tile of few outputs is shared among warps by its rows as well.
    m_warps: gl.constexpr = max(1, 16 * num_warps // BLOCK_N)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps // m_warps, m_warps],
        instr_shape=[16, BLOCK_M // m_warps, 16],
    )
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    up = acc
    slot = 0
    phase = 0
    freed = 0
    has_freed = False
    for unit in range(first, num_units, step):
        n_tile, m_tile, split, k_begin, k_end = _locate(unit, num_m_tiles, num_splits, num_k_blocks)
        for k in range(k_begin, k_end):
            mbarrier.wait(full.index(slot), phase)
            x_tile = rows.index(slot).permute((1, 0))
            acc = warpgroup_mma(
                weights.index(slot * NUM_PARTS), x_tile, acc, use_acc=k != k_begin, is_async=True
            )
            if IS_GATED:
                up = warpgroup_mma(
                    weights.index(slot * NUM_PARTS + 1),
                    x_tile,
                    up,
                    use_acc=k != k_begin,
                    is_async=True,
                )
                acc, up = warpgroup_mma_wait(num_outstanding=2, deps=(acc, up))
            else:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            has_load = has_freed & (load_unit < num_units)
            mbarrier.expect(full.index(freed), stage_bytes, pred=has_load)
            _request_weights(
                weight_desc, weights, full.index(freed), freed, load_n * BLOCK_N,
                load_k * BLOCK_K, num_outputs, has_load, NUM_PARTS,
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                x_desc,
                [load_m * BLOCK_M, load_k * BLOCK_K],
                full.index(freed),
                rows.index(freed),
                pred=has_load,
            )
            if has_load:
                load_unit, load_n, load_m, load_k, load_end = _advance(
                    load_unit, load_n, load_m, load_k, load_end, step,
                    num_m_tiles, num_splits, num_k_blocks,
                )  # fmt: skip
            has_freed = True
            freed = slot
            slot += 1
            if slot == NUM_STAGES:
                slot = 0
                phase ^= 1
        if IS_GATED:
            acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
            acc = acc / (1.0 + gl.exp(-acc)) * up
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if HAS_BULK_STORE:
            # The only unit of this program: nothing else will be loaded into its ring.
            ring = weights if BLOCK_N > BLOCK_M else rows
            _store_tile(out_desc, ring, acc, split, m_tile * BLOCK_M, n_tile * BLOCK_N)
        else:
            n = n_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
            m = m_tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
            row = (split * num_rows + m).to(gl.int64) * num_outputs
            gl.store(
                out_ptr + row[None, :] + n[:, None],
                acc.to(out_ptr.dtype.element_ty),
                mask=(m < num_rows)[None, :] & (n < num_outputs)[:, None],
            )
