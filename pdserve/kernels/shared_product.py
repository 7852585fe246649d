"""Hopper's matrix product for 64 to 256 rows: the work shared out evenly, the wide side second.

Letters: M rows, N outputs, K inputs, S splits of K. Beyond 64 rows arithmetic takes about as long
as reading the weights, so neither may wait for the other. The ring and its early start are those of
`streamed_product`; two things differ:

1. The wider side of a tile is the second operand of the tensor core instruction, up to 256 columns
   of it: that spares shared memory a third of its reads.
2. With `IS_SHARED` a fixed number of programs share all blocks of K of all tiles evenly, so that no
   multiprocessor idles in a last wave that is half empty. A tile may then begin in one program and
   end in those behind it; they leave their sums in memory, and the first adds them up in the order
   of K. Nothing is added by atomics: the bits depend on the plan and the device, not on time.
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

from pdserve.kernels.streamed_product import store_tile


@gluon.jit
def _take_share(num_k_blocks, num_splits, num_blocks, IS_SHARED: gl.constexpr):
    """Returns the first block of K of this program and the one after its last, over all tiles."""
    program = gl.program_id(0)
    if IS_SHARED:
        begin = program * num_blocks // gl.num_programs(0)
        end = (program + 1) * num_blocks // gl.num_programs(0)
    else:
        split = program % num_splits
        tile_begin = program // num_splits * num_k_blocks
        begin = tile_begin + num_k_blocks * split // num_splits
        end = tile_begin + num_k_blocks * (split + 1) // num_splits
    return begin, end


@gluon.jit
def _advance(tile, k, num_k_blocks):
    """Returns the tile and block of K that come next."""
    k += 1
    if k == num_k_blocks:
        k = 0
        tile += 1
    return tile, k


@gluon.jit
def _load_block(
    weight_desc,
    x_desc,
    weights,
    rows,
    full,
    slot,
    tile,
    k,
    num_m_tiles,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    has_block,
):
    """Asks for weights and rows of one place of the ring."""
    stage_bytes: gl.constexpr = weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    mbarrier.expect(full.index(slot), stage_bytes, pred=has_block)
    tma.async_copy_global_to_shared(
        weight_desc,
        [tile // num_m_tiles * BLOCK_N, k * BLOCK_K],
        full.index(slot),
        weights.index(slot),
        pred=has_block,
    )
    tma.async_copy_global_to_shared(
        x_desc,
        [tile % num_m_tiles * BLOCK_M, k * BLOCK_K],
        full.index(slot),
        rows.index(slot),
        pred=has_block,
    )


@gluon.jit(
    # one compiled kernel serves every shape and split
    do_not_specialize=[
        "num_rows",
        "num_outputs",
        "num_splits",
        "num_k_blocks",
        "num_m_tiles",
        "num_blocks",
    ]
)
def shared_product_kernel(
    weight_desc,
    x_desc,
    out_desc,
    out_ptr,
    sums_ptr,
    flags_ptr,
    num_rows,
    num_outputs,
    num_splits,
    num_k_blocks,
    num_m_tiles,
    num_blocks,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    HAS_BULK_STORE: gl.constexpr,
    IS_SHARED: gl.constexpr,
    USE_PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes out[split, m, n]: a program has a tile's split, or its share of all blocks."""
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_desc.dtype
    weights = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    if HAS_BULK_STORE:
        if IS_SHARED:
            out_tile = gl.allocate_shared_memory(
                out_desc.dtype, [1, BLOCK_M, BLOCK_N], out_desc.layout
            )
        else:
            # The ring is free when the only result of this program is written.
            ring = weights if BLOCK_N > BLOCK_M else rows
            out_tile = ring._reinterpret(out_desc.dtype, [1, BLOCK_M, BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    begin, end = _take_share(num_k_blocks, num_splits, num_blocks, IS_SHARED)

    # The first round of the ring: weights before the kernel ahead has ended, rows after it.
    stage_bytes: gl.constexpr = weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    load_tile = begin // num_k_blocks
    load_k = begin % num_k_blocks
    for stage in gl.static_range(NUM_STAGES):
        has_block = begin + stage < end
        mbarrier.expect(full.index(stage), stage_bytes, pred=has_block)
        tma.async_copy_global_to_shared(
            weight_desc,
            [load_tile // num_m_tiles * BLOCK_N, load_k * BLOCK_K],
            full.index(stage),
            weights.index(stage),
            pred=has_block,
        )
        load_tile, load_k = _advance(load_tile, load_k, num_k_blocks)
    if USE_PDL:
        gdc_wait()
    load_tile = begin // num_k_blocks
    load_k = begin % num_k_blocks
    for stage in gl.static_range(NUM_STAGES):
        tma.async_copy_global_to_shared(
            x_desc,
            [load_tile % num_m_tiles * BLOCK_M, load_k * BLOCK_K],
            full.index(stage),
            rows.index(stage),
            pred=begin + stage < end,
        )
        load_tile, load_k = _advance(load_tile, load_k, num_k_blocks)

    has_rows_first: gl.constexpr = BLOCK_N > BLOCK_M
    first_size: gl.constexpr = BLOCK_M if has_rows_first else BLOCK_N
    second_size: gl.constexpr = BLOCK_N if has_rows_first else BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, second_size, 16]
    )
    first = gl.arange(0, first_size, gl.SliceLayout(1, layout))[:, None]
    second = gl.arange(0, second_size, gl.SliceLayout(0, layout))[None, :]
    acc = gl.zeros([first_size, second_size], gl.float32, layout)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slot = 0
    phase = 0
    freed = 0
    load = begin + NUM_STAGES
    segment = begin
    while segment < end:
        tile = segment // num_k_blocks
        tile_begin = tile * num_k_blocks
        tile_end = tile_begin + num_k_blocks
        segment_end = gl.minimum(tile_end, end)
        for block in range(segment, segment_end):
            mbarrier.wait(full.index(slot), phase)
            if has_rows_first:
                first_tile = rows.index(slot)
                second_tile = weights.index(slot).permute((1, 0))
            else:
                first_tile = weights.index(slot)
                second_tile = rows.index(slot).permute((1, 0))
            acc = warpgroup_mma(
                first_tile, second_tile, acc, use_acc=block != segment, is_async=True
            )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            has_block = (block != segment) & (load < end)
            _load_block(
                weight_desc,
                x_desc,
                weights,
                rows,
                full,
                freed,
                load_tile,
                load_k,
                num_m_tiles,
                BLOCK_N,
                BLOCK_M,
                BLOCK_K,
                has_block,
            )
            if block != segment:
                load += 1
                load_tile, load_k = _advance(load_tile, load_k, num_k_blocks)
            freed = slot
            slot += 1
            if slot == NUM_STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        _load_block(
            weight_desc,
            x_desc,
            weights,
            rows,
            full,
            freed,
            load_tile,
            load_k,
            num_m_tiles,
            BLOCK_N,
            BLOCK_M,
            BLOCK_K,
            load < end,
        )
        load += 1
        load_tile, load_k = _advance(load_tile, load_k, num_k_blocks)

        is_written = True
        split = 0
        if IS_SHARED:
            is_written = segment == tile_begin
            sums = sums_ptr + first * second_size + second
            if is_written:
                # The rest of the tile lies with the programs behind, which took it up first.
                other = program + 1
                while other * num_blocks // programs < tile_end:
                    while gl.atomic_cas(flags_ptr + other, 1, 0, sem="acquire", scope="gpu") != 1:
                        pass
                    gl.thread_barrier()
                    offset = other.to(gl.int64) * (BLOCK_N * BLOCK_M)
                    acc += gl.load(sums + offset, cache_modifier=".cg")
                    other += 1
            else:
                gl.store(sums + program.to(gl.int64) * (BLOCK_N * BLOCK_M), acc)
                gl.thread_barrier()
                gl.atomic_xchg(flags_ptr + program, 1, sem="release", scope="gpu")
        else:
            split = program % num_splits
        if is_written:
            m_begin = tile % num_m_tiles * BLOCK_M
            n_begin = tile // num_m_tiles * BLOCK_N
            if HAS_BULK_STORE:
                tma.store_wait(0)
                gl.thread_barrier()
                store_tile(out_desc, out_tile, acc, split, m_begin, n_begin, has_rows_first)
            else:
                m = m_begin + (first if has_rows_first else second)
                n = n_begin + (second if has_rows_first else first)
                row = gl.cast(split * num_rows, gl.int64) * num_outputs
                gl.store(
                    out_ptr + row + (m * num_outputs + n),
                    acc.to(out_ptr.dtype.element_ty),
                    mask=(m < num_rows) & (n < num_outputs),
                )
        segment = segment_end
    if HAS_BULK_STORE:
        tma.store_wait(0)
