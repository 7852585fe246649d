"""Hopper's matrix product for 65 to 256 rows: work shared out evenly, loads by a warp of their own.

Letters: M rows, N outputs, K inputs, S splits of K. Beyond 64 rows arithmetic takes about as long
as reading the weights, so neither may wait for the other. This kernel differs from
`streamed_product` in three ways:

1. One warp does nothing but fill the ring (warp specialisation); two warp groups multiply, and
   while they write a result the ring fills up with the next tile.
2. The wider side of a tile is the second operand of the tensor core instruction (256 columns of
   it at best), which spares shared memory a third of its reads.
3. With `IS_SHARED` a fixed number of programs share all blocks of K of all tiles evenly, so that no
   multiprocessor idles in a last wave that is half empty. A tile may then begin in one program and
   end in the next ones; these leave their sums in memory and the first adds them up in the order
   of K. No atomics touch a result: its bits depend on the plan and the device, not on time.
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

LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _take_share(num_k_blocks, num_splits, num_blocks, IS_SHARED: gl.constexpr):
    """Returns the first block of K of this program and the one after its last, over all tiles."""
    program = gl.program_id(0)
    if IS_SHARED:
        programs = gl.num_programs(0)
        return program * num_blocks // programs, (program + 1) * num_blocks // programs
    split = program % num_splits
    tile_begin = program // num_splits * num_k_blocks
    return (
        tile_begin + num_k_blocks * split // num_splits,
        tile_begin + num_k_blocks * (split + 1) // num_splits,
    )


@gluon.jit
def _load_blocks(
    weight_desc,
    x_desc,
    weights,
    rows,
    full,
    empty,
    begin,
    end,
    num_k_blocks,
    num_m_tiles,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Fills the ring: weights of its first round before the kernel ahead has ended."""
    stage_bytes: gl.constexpr = weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    for stage in gl.static_range(NUM_STAGES):
        block = begin + stage
        has_block = block < end
        tile = block // num_k_blocks
        mbarrier.expect(full.index(stage), stage_bytes, pred=has_block)
        tma.async_copy_global_to_shared(
            weight_desc,
            [tile // num_m_tiles * BLOCK_N, block % num_k_blocks * BLOCK_K],
            full.index(stage),
            weights.index(stage),
            pred=has_block,
        )
    if USE_PDL:
        gdc_wait()
    for stage in gl.static_range(NUM_STAGES):
        block = begin + stage
        tile = block // num_k_blocks
        tma.async_copy_global_to_shared(
            x_desc,
            [tile % num_m_tiles * BLOCK_M, block % num_k_blocks * BLOCK_K],
            full.index(stage),
            rows.index(stage),
            pred=block < end,
        )
    slot = 0
    phase = 0
    for block in range(begin + NUM_STAGES, end):
        tile = block // num_k_blocks
        k = block % num_k_blocks * BLOCK_K
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), stage_bytes)
        tma.async_copy_global_to_shared(
            weight_desc,
            [tile // num_m_tiles * BLOCK_N, k],
            full.index(slot),
            weights.index(slot),
        )
        tma.async_copy_global_to_shared(
            x_desc,
            [tile % num_m_tiles * BLOCK_M, k],
            full.index(slot),
            rows.index(slot),
        )
        slot += 1
        if slot == NUM_STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _multiply_blocks(
    weights,
    rows,
    full,
    empty,
    out_ptr,
    sums_ptr,
    flags_ptr,
    begin,
    end,
    num_rows,
    num_outputs,
    num_splits,
    num_k_blocks,
    num_m_tiles,
    num_blocks,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    IS_SHARED: gl.constexpr,
    USE_PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Empties the ring and writes the results."""
    has_rows_first: gl.constexpr = BLOCK_N > BLOCK_M
    first_size: gl.constexpr = BLOCK_M if has_rows_first else BLOCK_N
    second_size: gl.constexpr = BLOCK_N if has_rows_first else BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, second_size, 16]
    )
    first = gl.arange(0, first_size, gl.SliceLayout(1, layout))[:, None]
    second = gl.arange(0, second_size, gl.SliceLayout(0, layout))[None, :]
    place = first * second_size + second
    acc = gl.zeros([first_size, second_size], gl.float32, layout)
    program = gl.program_id(0)
    if USE_PDL:
        gdc_wait()
    slot = 0
    phase = 0
    segment = begin
    while segment < end:
        tile = segment // num_k_blocks
        tile_begin = tile * num_k_blocks
        tile_end = tile_begin + num_k_blocks
        segment_end = gl.minimum(tile_end, end)
        freed = slot
        for block in range(segment, segment_end):
            mbarrier.wait(full.index(slot), phase)
            if has_rows_first:
                acc = warpgroup_mma(
                    rows.index(slot),
                    weights.index(slot).permute((1, 0)),
                    acc,
                    use_acc=block != segment,
                    is_async=True,
                )
            else:
                acc = warpgroup_mma(
                    weights.index(slot),
                    rows.index(slot).permute((1, 0)),
                    acc,
                    use_acc=block != segment,
                    is_async=True,
                )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(freed), pred=block != segment)
            freed = slot
            slot += 1
            if slot == NUM_STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(freed))

        is_whole = True
        split = 0
        if IS_SHARED:
            is_whole = segment == tile_begin
            if is_whole:
                # The rest of the tile lies with the programs behind, which took it up first.
                other = program + 1
                programs = gl.num_programs(0)
                while other * num_blocks // programs < tile_end:
                    while gl.atomic_cas(flags_ptr + other, 1, 0, sem="acquire", scope="gpu") != 1:
                        pass
                    gl.thread_barrier()
                    acc += gl.load(
                        sums_ptr + other.to(gl.int64) * (BLOCK_N * BLOCK_M) + place,
                        cache_modifier=".cg",
                    )
                    other += 1
            else:
                gl.store(sums_ptr + program.to(gl.int64) * (BLOCK_N * BLOCK_M) + place, acc)
                gl.thread_barrier()
                gl.atomic_xchg(flags_ptr + program, 1, sem="release", scope="gpu")
        else:
            split = program % num_splits
        if is_whole:
            m = tile % num_m_tiles * BLOCK_M + (first if has_rows_first else second)
            n = tile // num_m_tiles * BLOCK_N + (second if has_rows_first else first)
            gl.store(
                out_ptr + gl.cast(split * num_rows, gl.int64) * num_outputs + (m * num_outputs + n),
                acc.to(out_ptr.dtype.element_ty),
                mask=(m < num_rows) & (n < num_outputs),
            )
        segment = segment_end


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
def loader_product_kernel(
    weight_desc,
    x_desc,
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
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    begin, end = _take_share(num_k_blocks, num_splits, num_blocks, IS_SHARED)
    gl.warp_specialize(
        [
            (
                _multiply_blocks,
                (
                    weights,
                    rows,
                    full,
                    empty,
                    out_ptr,
                    sums_ptr,
                    flags_ptr,
                    begin,
                    end,
                    num_rows,
                    num_outputs,
                    num_splits,
                    num_k_blocks,
                    num_m_tiles,
                    num_blocks,
                    BLOCK_N,
                    BLOCK_M,
                    NUM_STAGES,
                    IS_SHARED,
                    USE_PDL,
                    num_warps,
                ),
            ),
            (
                _load_blocks,
                (
                    weight_desc,
                    x_desc,
                    weights,
                    rows,
                    full,
                    empty,
                    begin,
                    end,
                    num_k_blocks,
                    num_m_tiles,
                    BLOCK_N,
                    BLOCK_M,
                    BLOCK_K,
                    NUM_STAGES,
                    USE_PDL,
                ),
            ),
        ],
        [1],
        [LOADER_REGISTERS],
    )
